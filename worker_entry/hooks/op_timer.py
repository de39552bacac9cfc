"""Measures how long operations take, in Python and inside of a graph."""

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
"""An accumulator drops what is older than its last reading; this never is."""

_numbers = itertools.count()


class OpTimer:
    """Sums up seconds: an accumulator of TensorFlow those in graphs, this object those in Python.

    In a graph, timed operations get a clock before them and one after them. The accumulator has a name and is not a
    variable: a graph that captures a variable which no object of the program owns can no longer be exported.
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
        """The sum so far; to be called from one thread at a time.

        Raises:
            Exception: the accumulator cannot be read now, because a graph is built, for example.
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
        """Calls, in Python."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._python_s += time.perf_counter() - began

    def begin(self, inputs: Sequence[Any]) -> Any:
        """Adds a clock to the graph that is built now, which is read when the inputs are there; None if it cannot."""
        tf = sys.modules["tensorflow"]
        with contextlib.suppress(Exception):  # a program that cannot be timed has to run all the same
            if _can_time(tf.compat.v1.get_default_graph()):
                with tf.device("CPU:0"), tf.control_dependencies(inputs):
                    return tf.timestamp()
        return None

    def end(self, began: Any, outputs: Any) -> Any:
        """Adds the seconds from `begin` until the outputs are there; returns the clock that was read then, or None."""
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
        """The accumulator, which is made where it is missing."""
        make = tf.raw_ops.ResourceConditionalAccumulator
        return make(dtype=tf.float64, shape=(), shared_name=self._name, reduction_type="SUM")


def is_deterministic() -> bool:
    """Whether the program asks for deterministic operations, by a call at any time or by TF_DETERMINISTIC_OPS."""
    return bool(sys.modules[CONFIG].is_op_determinism_enabled())


def _can_time(graph: Any) -> bool:
    """Whether operations of the graph that is built now can have a clock.

    TensorFlow refuses clocks where operations are deterministic, and XLA has none. A process that controls others, as
    under ParameterServerStrategy, builds graphs that run elsewhere.
    """
    return (
        graph.building_function
        and graph._get_control_flow_context() is None  # as in a loop of TensorFlow 1
        and not is_deterministic()
        and sys.modules[CONTEXT].get_server_def() is None
        and not sys.modules[CONTROL_FLOW].GraphOrParentsInXlaContext(graph)
    )
