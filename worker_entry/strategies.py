"""Builds the tf.distribute strategy that is selected for the run:

    from worker_entry import strategies

    strategy = strategies.from_environment()

A program that builds its own strategy does not need this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Optional

from worker_entry.protocol import environment
from worker_entry.protocol.strategy_names import StrategyName

DEFAULT = "multi_worker_mirrored"
"""The strategy without a launcher; without TF_CONFIG, its only worker is this process."""


def from_environment(environ: Mapping[str, str] = os.environ) -> Any:
    """Builds the strategy. Call this function before the program uses any other part of TensorFlow.

    Under `parameter_server`, the chief passes the strategy to `tf.distribute.coordinator.ClusterCoordinator`.

    Raises:
        ValueError: DISTLAUNCH_STRATEGY names no strategy.
        RuntimeError: the strategy is `tpu`, but no TPU is available.
    """
    import tensorflow as tf

    name = environ.get(environment.STRATEGY, DEFAULT)
    make: Mapping[StrategyName, Callable[[], Any]] = {
        "one_device": lambda: tf.distribute.OneDeviceStrategy(_devices(tf)[0]),
        "mirrored": lambda: tf.distribute.MirroredStrategy(
            _devices(tf), _cross_device(tf, environ.get(environment.CROSS_DEVICE))
        ),
        "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(_devices(tf), "/cpu:0"),
        "multi_worker_mirrored": lambda: _make_multi_worker_strategy(
            tf, environ.get(environment.COMMUNICATION, "auto")
        ),
        "parameter_server": lambda: tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver()
        ),
        "tpu": lambda: _make_tpu_strategy(tf, environ),
    }
    for known, make_strategy in make.items():
        if name == known:
            return make_strategy()
    raise ValueError(f"{environment.STRATEGY} is {name!r}, which is not a strategy")


def _make_multi_worker_strategy(tf: Any, communication: str) -> Any:
    experimental = tf.distribute.experimental
    implementation = experimental.CommunicationImplementation[communication.upper()]
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(implementation=implementation)
    )


def _devices(tf: Any) -> list[str]:
    """All GPUs; without a GPU, all CPU devices: several if the CPU was divided."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [f"/{kind.lower()}:{index}" for index, _ in enumerate(tf.config.list_logical_devices(kind))]


def _cross_device(tf: Any, name: Optional[str]) -> Any:
    kinds = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }
    return kinds[name]() if name is not None else None


def _first_sentence(error: Exception) -> str:
    """The error's class and its whole first sentence: a truncated text could lose half of the instructions."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _make_tpu_strategy(tf: Any, environ: Mapping[str, str]) -> Any:
    """The strategy for the TPU that TPU_NAME names, or for this TPU VM if TPU_NAME is not set."""
    name = environ.get("TPU_NAME", "local")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except Exception as error:
        missing = "TPU_NAME is not set, and this is not a TPU VM" if name == "local" else f"{name} cannot be used"
        raise RuntimeError(
            f"no TPU: {missing} ({_first_sentence(error)}); "
            "run this on a TPU VM with the build of TensorFlow for TPUs (`pip install tensorflow-tpu`)"
        ) from error
    return tf.distribute.TPUStrategy(resolver)
