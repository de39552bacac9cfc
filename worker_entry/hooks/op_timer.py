"""Measures how long operations take, in Python and inside a graph."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

CONFIG = "tensorflow.python.framework.config"
CONTEXT = "tensorflow.python.eager.context"
CONTROL_FLOW = "tensorflow.python.ops.control_flow_util"
SUM = "distlaunch_seconds"
ANY_STEP = 1 << 62
"""The step number of all values: an accumulator drops a value that is older than its last reading; these never are."""

_numbers = itertools.count()


class OpTimer:
    """Sums up the seconds of operations: in graphs with a TensorFlow accumulator, in Python with this object.

    In a graph, a clock is added before the timed operations and another one after them. The accumulator is found by its
    name, not kept in a variable: a graph that captures a variable without an owner in the program cannot be exported.
    """

    def __init__(self) -> None:
        self._name = f"{SUM}_{next(_numbers)}"
        self._python_s = self._read_s = 0.0
        self._in_graphs = False

    @property
    def used(self) -> bool:
        """Whether anything was timed."""
        return self._in_graphs or self._python_s > 0

    def seconds(self) -> float:
        """The sum so far; only one thread at a time may call this function.

        Raises:
            Exception: the accumulator cannot be read now, for example because a graph is being built.
        """
        if self._in_graphs:
            tf = sys.modules["tensorflow"]
            with tf.device("CPU:0"):
                total = self._open(tf)
                if int(tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=total)):
                    read = tf.raw_ops.ResourceAccumulatorTakeGradient(handle=total, num_required=1, dtype=tf.float64)
                    self._read_s += float(read)
        return self._python_s + self._read_s

    def time_call(self, call: Callable[[], Any]) -> Any:
        """Calls a function in Python, and adds its time."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._python_s += time.perf_counter() - began

    def begin(self, inputs: Sequence[Any]) -> Any:
        """Adds a clock to the graph being built, to be read when the inputs are ready; returns None if that fails."""
        tf = sys.modules["tensorflow"]
        with contextlib.suppress(Exception):  # a program that cannot be timed must still run
            if _can_time(tf.compat.v1.get_default_graph()):
                with tf.device("CPU:0"), tf.control_dependencies(inputs):
                    return tf.timestamp()
        return None

    def end(self, began: Any, outputs: Any) -> Any:
        """Adds the seconds from `begin` until the outputs are ready; returns the last clock, or None if that fails."""
        tf = sys.modules["tensorflow"]
        tensors = [output for output in tf.nest.flatten(outputs, expand_composites=True) if tf.is_tensor(output)]
        with contextlib.suppress(Exception), tf.device("CPU:0"), tf.control_dependencies(tensors):
            ended, step = tf.timestamp(), tf.constant(ANY_STEP, tf.int64)
            add = tf.raw_ops.ResourceAccumulatorApplyGradient
            add(handle=self._open(tf), local_step=step, gradient=ended - began)
            self._in_graphs = True
            return ended
        return None

    def _open(self, tf: Any) -> Any:
        """The accumulator; creates it if it does not exist."""
        make = tf.raw_ops.ResourceConditionalAccumulator
        return make(dtype=tf.float64, shape=(), shared_name=self._name, reduction_type="SUM")


def is_deterministic() -> bool:
    """Whether the program asks for deterministic operations, by a call at any time or by TF_DETERMINISTIC_OPS."""
    return bool(sys.modules[CONFIG].is_op_determinism_enabled())


def _can_time(graph: Any) -> bool:
    """Whether operations of the graph being built can be timed.

    TensorFlow refuses clocks if operations must be deterministic, and XLA has none. A process that controls other
    processes, as under ParameterServerStrategy, builds graphs that run elsewhere.
    """
    return (
        graph.building_function
        and graph._get_control_flow_context() is None  # as in a loop of TensorFlow 1
        and not is_deterministic()
        and sys.modules[CONTEXT].get_server_def() is None
        and not sys.modules[CONTROL_FLOW].GraphOrParentsInXlaContext(graph)
    )
