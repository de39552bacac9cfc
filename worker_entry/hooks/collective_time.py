"""Measures how long this worker waits for the others, which cannot be seen from the duration of a step.

In synchronous training all workers take the same time for a step, because each waits in its collectives for the
slowest. So each collective gets two more operations that measure its time; the rest of a step is the worker's own.

On a GPU a collective is queued long before its input is ready, so its time means nothing and is not measured. It is
not measured either in a program that asks for deterministic operations: TensorFlow then refuses a clock.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import

UTILS = "tensorflow.python.distribute.cross_device_utils"
CONFIG = "tensorflow.python.framework.config"


class CollectiveClock:
    """Measures this process's collectives, beginning when TensorFlow is imported."""

    def __init__(self) -> None:
        self._waits: list[_Wait] = []
        after_import(UTILS, self._watch)

    def waited_s(self) -> Optional[float]:
        """Seconds that the replica that has waited longest has waited so far; None if that is not known."""
        try:
            if _is_deterministic():
                return None
            return max((wait.seconds() for wait in self._waits), default=None)
        except Exception:  # noqa: BLE001 - a variable cannot be read while a graph is built, for example
            return None

    def _watch(self, module: ModuleType) -> None:
        launcher = getattr(module, "CollectiveReplicaLauncher", None)
        if launcher is None or "input_tensor" not in inspect.signature(launcher.all_reduce).parameters:
            return
        initialize, reduce = launcher.__init__, launcher.all_reduce
        waits: weakref.WeakKeyDictionary[Any, _Wait] = weakref.WeakKeyDictionary()

        @functools.wraps(initialize)
        def initialize_and_measure(self_: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self_, *args, **kwargs)
            if "GPU" not in str(getattr(self_, "_device", "GPU")).upper():
                waits[self_] = _Wait(sys.modules["tensorflow"])
                self._waits.append(waits[self_])

        @functools.wraps(reduce)
        def all_reduce(self_: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return reduce(self_, input_tensor, *args, **kwargs)

            return waits[self_].measure(input_tensor, call) if self_ in waits else call()

        launcher.__init__ = initialize_and_measure
        launcher.all_reduce = all_reduce


class _Wait:
    """How long one replica has waited: a variable sums up the time in graphs, this object the time outside."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf
        self._eager = 0.0
        with tf.init_scope(), tf.device("CPU:0"):
            # Not tf.Variable: a strategy would replace it by its own kind of variable.
            variable = sys.modules["tensorflow.python.ops.resource_variable_ops"].ResourceVariable
            self._variable = variable(0.0, dtype=tf.float64, trainable=False)

    def seconds(self) -> float:
        return self._eager + float(self._variable.read_value())

    def measure(self, input_tensor: Any, call: Callable[[], Any]) -> Any:
        tf = self._tf
        if _is_deterministic():
            return call()
        if tf.executing_eagerly():
            began = time.perf_counter()
            reduced = call()
            self._eager += time.perf_counter() - began
            return reduced
        graph = tf.compat.v1.get_default_graph()
        if not graph.building_function or _is_compiled(graph):
            return call()
        with tf.device("CPU:0"), tf.control_dependencies([input_tensor]):
            began = tf.timestamp()
        reduced = call()
        with tf.device("CPU:0"), tf.control_dependencies([reduced]):
            self._variable.assign_add(tf.timestamp() - began, read_value=False)
        return reduced


def _is_deterministic() -> bool:
    """Whether the program asks for deterministic operations, by a call at any time or by TF_DETERMINISTIC_OPS."""
    return bool(sys.modules[CONFIG].is_op_determinism_enabled())


def _is_compiled(graph: Any) -> bool:
    """Whether XLA compiles the graph: XLA has no clock."""
    return bool(sys.modules["tensorflow.python.ops.control_flow_util"].GraphOrParentsInXlaContext(graph))
