"""Watches which tf.distribute strategies a program builds: some need patches, others do not use the cluster."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from worker_entry.hooks import jax_cluster
from worker_entry.hooks.import_hooks import after_import
from worker_entry.protocol.strategy_names import JAX, OTHER_NAMES

CONNECTING = ("horovod", "mpi4py", "byteps", "keras_tuner", "kerastuner", "ray", "torch")
"""Modules with which processes can train together, or divide their work, without a strategy of TensorFlow's.

JAX is not one of them: where it is installed, TensorFlow imports it.
"""
STRATEGIES = "tensorflow.python.distribute.distribute_lib"
PREEMPTION = "tensorflow.python.distribute.failure_handling.failure_handling"
DEFAULT = "_DefaultDistributionStrategy"
"""Prefix of the class names of strategies that TensorFlow builds by default."""


def watch_jax(report: Callable[[str], None]) -> None:
    """Calls `report` if the program imports JAX and has not imported TensorFlow before."""
    after_import(JAX, lambda _: None if "tensorflow" in sys.modules else report(JAX))


def is_connected() -> bool:
    """Whether the program may connect its processes, or divide their work, without a strategy of TensorFlow's."""
    return jax_cluster.is_connected() or any(name in sys.modules for name in CONNECTING)


def find_name(strategy: Any) -> str:
    """The name by which users know the strategy's class."""
    name = type(strategy).__name__
    return OTHER_NAMES.get(name, name)


def watch_strategies(then: Callable[[Any], None]) -> None:
    """Calls `then` with each strategy that the program builds; `then` must not raise."""

    def note(strategy: Any) -> None:
        if not type(strategy).__name__.startswith(DEFAULT):
            then(strategy)

    watch_objects(STRATEGIES, "StrategyBase", note)


def watch_preemption_handlers(then: Callable[[], None]) -> None:
    """Calls `then` when the program builds a PreemptionCheckpointHandler; `then` must not raise."""
    watch_objects(PREEMPTION, "PreemptionCheckpointHandler", lambda _: then())


def watch_objects(
    module_name: str,
    class_name: str,
    then: Callable[[Any], None] = lambda _: None,
    *,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Calls `before` before each new object of a module's class is initialized, and `then` with the object after it."""

    def watch(module: ModuleType) -> None:
        base = getattr(module, class_name, None)
        if base is None:
            return
        original = base.__init__

        @functools.wraps(original)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            before()
            original(self, *args, **kwargs)
            then(self)

        base.__init__ = initialize

    after_import(module_name, watch)


def after_strategy(then: Callable[[], None], *, several: bool) -> None:
    """Calls `then` once, when the program has built a strategy of several replicas or, else, of one replica."""
    built: list[Any] = []

    def watch(strategy: Any) -> None:
        with contextlib.suppress(Exception):  # a third-party strategy may not know its replicas yet
            if not built and (strategy.num_replicas_in_sync > 1) == several:
                built.append(strategy)
                then()

    watch_strategies(watch)
