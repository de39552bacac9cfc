"""State of a replica's step: whether it is a step of Keras, and whether its batch is empty.

Keras runs `train_step` or `test_step` in every replica. `in_step` surrounds this call, in the replica's own thread, so
that other patches can ask here. Without it, they cannot tell Keras's steps from those of a program's own loop, which
scales its losses itself.

A replica may get no sample of an uneven last batch. Means over such a batch are NaN, and so is every sum that
includes them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from worker_entry.keras_patches.source import find_shared_context

_thread = threading.local()
"""`_thread.steps`: the steps that this thread is in. Each replica has its own thread."""


class Step:
    """A step of one replica.

    Attributes:
        graph: the graph, or the eager context, in which the step's function runs.
        is_empty: a scalar bool tensor of that graph, or None if the batch has samples for certain.
        is_scaled: whether a loss was divided by the number of replicas.
        reduces: whether an optimizer added up the gradients of the replicas.
    """

    def __init__(self, graph: Any, is_empty: Any) -> None:
        self.graph = graph
        self.is_empty = is_empty
        self.is_scaled = False
        self.reduces = False


def find_step() -> Any:
    """The innermost `Step` that this thread is in, or None."""
    steps = getattr(_thread, "steps", None)
    return steps[-1] if steps else None


def in_step(trainer: Any, function: Callable[[Any], Any], then: Callable[[Step], None]) -> Callable[[Any], Any]:
    """Wraps a step function of Keras, whose argument is a batch; without other replicas, it does nothing.

    `then` is called with the step when it is over.
    """

    @functools.wraps(function)
    def step(data: Any) -> Any:
        if find_shared_context(trainer) is None:
            return function(data)
        steps = _thread.__dict__.setdefault("steps", [])
        steps.append(Step(_graph(trainer.tf), _is_empty(trainer, data)))
        try:
            result = function(data)
        finally:
            ended = steps.pop()
        then(ended)
        return result

    return step


def find_empty(trainer: Any) -> Any:
    """Whether the batch of the current step is empty, as a scalar bool tensor; None if it is not, or unknown here.

    It is unknown in another function of TensorFlow that the step calls: this function may be called again by another
    step, and must not capture this one's tensor. The branches of a condition may.
    """
    step = find_step()
    if step is None or step.is_empty is None:
        return None
    graph = _graph(trainer.tf)
    while graph is not step.graph and _is_of_control_flow(graph):
        graph = graph.outer_graph
    return step.is_empty if graph is step.graph else None


def without_nan(trainer: Any, value: Any) -> Any:
    """The value, or 0 where it is not finite because the batch is empty."""
    tf = trainer.tf
    is_empty = find_empty(trainer)
    if is_empty is None or not value.dtype.is_floating:
        return value
    return tf.where(tf.logical_and(is_empty, tf.logical_not(tf.math.is_finite(value))), tf.zeros_like(value), value)


def can_merge(trainer: Any) -> bool:
    """Whether replicas can exchange values here: not in a condition, nor in another function that the step calls."""
    tf = trainer.tf
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return True
    return getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph()


def _graph(tf: Any) -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _is_of_control_flow(graph: Any) -> bool:
    return type(graph).__name__ in ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph")


def _is_empty(trainer: Any, data: Any) -> Any:
    tf = trainer.tf
    for leaf in trainer.tree.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank == 0:
            continue
        if shape.rank is not None and shape[0]:
            return None
        if isinstance(leaf, tf.SparseTensor):
            return tf.equal(leaf.dense_shape[0], 0)
        if isinstance(leaf, tf.RaggedTensor):
            return tf.equal(leaf.nrows(), 0)
        return tf.equal(tf.shape(leaf)[0], 0)
    return None
