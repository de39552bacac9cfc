"""The names that specs and programs use for the strategies of tf.distribute and their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

StrategyName = Literal[
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker_mirrored",
    "parameter_server",
    "tpu",
]
CLASSES: Mapping[StrategyName, str] = {
    "one_device": "OneDeviceStrategy",
    "mirrored": "MirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "multi_worker_mirrored": "CollectiveAllReduceStrategy",
    "parameter_server": "ParameterServerStrategyV2",
    "tpu": "TPUStrategyV2",
}
"""The names that TensorFlow's classes have at run time."""
OTHER_NAMES: Mapping[str, str] = {
    "CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy",
    "_CollectiveAllReduceStrategyExperimental": "MultiWorkerMirroredStrategy",
    "CollectiveAllReduceStrategyV1": "MultiWorkerMirroredStrategy",
}
"""The names by which users know classes, where these differ."""
NO_STRATEGY = "no strategy"
"""Reported by a program that trains with Keras and TensorFlow alone: each of its processes has a model of its own."""
JAX = "jax"
"""Reported by a program that imports JAX, which does not need TF_CONFIG."""
Communication = Literal["auto", "ring", "nccl"]
"""All-reduce implementation; MultiWorkerMirroredStrategy only."""
CrossDevice = Literal["nccl", "hierarchical_copy", "reduction_to_one_device"]
"""All-reduce algorithm; MirroredStrategy only."""
