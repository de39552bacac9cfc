"""Patches Keras 3's BatchNormalization: `patching` describes the faults."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import calls_of, find_shared_context, is_constant

BATCH_NORMALIZATION = "keras.src.layers.normalization.batch_normalization"


def patch_batch_normalization(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces faulty methods of the layer."""
    layer = module.BatchNormalization
    if _leaves_statistics_apart(layer):
        layer.add_weight = _patched_add_weight(layer.add_weight)
        yield patched("BatchNormalization.add_weight")
    else:
        yield unpatched("BatchNormalization.add_weight", fixed=bool(_statistics(layer)))
    moments = getattr(layer, "_moments", None)
    looks_at_size = any(calls_of(layer.call, name) for name in ("cond", "where", "shape", "size"))
    if moments is not None and not looks_at_size:
        layer._moments = _patched_moments(trainer, moments)
        yield patched("BatchNormalization._moments")
    else:
        yield unpatched("BatchNormalization._moments", fixed=looks_at_size)


def _patched_add_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith(("moving_", "renorm_")):
            kwargs.setdefault("aggregation", "mean")
        return original(self, *args, **kwargs)

    return add_weight


def _patched_moments(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        mean, variance = original(self, inputs, mask)
        if self.synchronized or find_shared_context(trainer) is None:
            return mean, variance
        # An empty batch has no moments. The moving statistics replace them, so that these statistics do not change.
        empty = tf.equal(tf.size(inputs), 0)
        return (
            tf.where(empty, tf.cast(self.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(self.moving_variance, variance.dtype), variance),
        )

    return _moments


def _leaves_statistics_apart(layer: Any) -> bool:
    """Whether the layer's moving statistics are weights without an aggregation, explicit or by default."""
    default = inspect.signature(layer.add_weight).parameters["aggregation"].default
    return default in (None, "none") and any(
        all(word.arg != "aggregation" for word in call.keywords) for call in _statistics(layer)
    )


def _statistics(layer: Any) -> list[ast.Call]:
    """The calls that create a moving mean."""
    return [
        call
        for call in calls_of(layer.build, "add_weight")
        if any(word.arg == "name" and is_constant(word.value, "moving_mean") for word in call.keywords)
    ]
