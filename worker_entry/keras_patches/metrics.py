"""Patches Keras 3's metrics: `patching` describes the faults.

Each replica counts its own samples, and Keras adds up the counts when it reads a metric outside of a step. Inside, it
computes each replica's own result, and averages these for the logs of a batch, which is wrong for metrics that are not
means. With this patch, the replicas add up their counts in one collective, and each computes the common result.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import find_common_trainer, find_module, find_shared_context, mentions
from worker_entry.keras_patches.step import can_merge
from worker_entry.keras_patches.variables import VARIABLE

STATELESS_SCOPE = "keras.src.backend.common.stateless_scope"
COMMON = "_distlaunch_common"
"""An attribute of tensors that are the same in all replicas."""


def patch_metrics(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces `result` of all metrics, and of those that the program defines later."""
    places = ("Metric.result", "get_metrics_result")
    metric = module.Metric
    common = find_common_trainer()
    results = getattr(common, "get_metrics_result", None)
    fixed = results is not None and mentions(results, "all_reduce")
    if STATELESS_SCOPE not in sys.modules or results is None or fixed:
        yield from (unpatched(place, fixed=fixed) for place in places)
        return
    common.get_metrics_result = _patched_metrics_result(trainer, results)
    classes = [metric]
    while classes:
        each = classes.pop()
        classes += each.__subclasses__()
        _patch_result(trainer, each)
    define = metric.__init_subclass__

    def patch_subclass(cls: type, /, **options: Any) -> None:
        define(**options)
        _patch_result(trainer, cls)

    metric.__init_subclass__ = classmethod(patch_subclass)
    yield from map(patched, places)


def _patched_metrics_result(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_metrics_result(self: Any) -> Any:
        # One collective for all metrics, instead of one for each.
        with _added_up(trainer, [variable for metric in self.metrics for variable in metric.variables]) as is_common:
            return _marked(trainer, original(self), is_common=is_common)

    return get_metrics_result


def is_common(values: Sequence[Any]) -> bool:
    """Whether these values of a worker's replicas are the same in all replicas of the cluster."""
    return all(getattr(value, COMMON, False) for value in values)


def _patch_result(trainer: Any, metric: Any) -> None:
    original = vars(metric).get("result")
    if not callable(original):
        return

    @functools.wraps(original)
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _added_up(trainer, self.variables) as is_common:
            return _marked(trainer, original(self, *args, **kwargs), is_common=is_common)

    metric.result = result


@contextlib.contextmanager
def _added_up(trainer: Any, variables: Sequence[Any]) -> Iterator[bool]:
    """Temporarily gives these variables of metrics the values of all replicas together.

    Yields whether they now have values that are the same in all replicas.
    """
    scopes: Any = sys.modules[STATELESS_SCOPE]
    context = find_shared_context(trainer)
    if context is None or scopes.in_stateless_scope() or not can_merge(trainer):
        yield False
        return
    counts = [v for v in variables if v.synchronization == "on_read" and v.aggregation in ("sum", "mean")]
    if not counts:
        yield False
        return
    with scopes.StatelessScope(state_mapping=_reduce(trainer.tf, context, counts)):
        yield len(counts) == len(variables)


def _reduce(tf: Any, context: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The variables with the sums, or means, of all replicas' values; one collective for each dtype."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for variable in variables:
        kinds.setdefault((variable.aggregation, variable.dtype), []).append(variable)
    reduced = []
    for (aggregation, _), alike in kinds.items():
        shapes = [tuple(variable.shape) for variable in alike]
        sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
        values = tf.concat([tf.reshape(tf.convert_to_tensor(variable.value), [-1]) for variable in alike], 0)
        parts = tf.split(context.all_reduce(aggregation.upper(), values), sizes)
        reduced += [
            (variable, tf.reshape(part, shape))
            for variable, part, shape in zip(alike, parts, shapes)  # noqa: B905 - Python 3.9 has no strict
        ]
    return reduced


def _marked(trainer: Any, result: Any, *, is_common: bool) -> Any:
    variable = find_module(VARIABLE).Variable

    def mark(value: Any) -> Any:
        if isinstance(value, variable):  # which has its own value again after the scope
            value = trainer.tf.convert_to_tensor(value)
        with contextlib.suppress(AttributeError):  # a number
            setattr(value, COMMON, True)
        return value

    return trainer.tree.map_structure(mark, result) if is_common else result
