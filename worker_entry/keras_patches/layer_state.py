"""Patches Keras 3's layers: `patching` describes the fault.

A layer may keep a state of its own: a running mean, a codebook, the centres of classes. It computes the new state from
its replica's samples, so that every replica would get another state, of which only the chief's is saved. With this
patch, all replicas get the mean of their new states, as with `BatchNormalization`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.source import find_shared_context, mentions
from worker_entry.keras_patches.step import can_merge, find_empty

GLOBAL_STATE = "keras.src.backend.common.global_state"
CALL_CONTEXT = "current_call_ctx"
"""Keras's name for what it keeps while it calls a layer."""


def patch_layer_state(trainer: Any, module: Any, news: News) -> Iterator[Finding]:
    """Replaces the function that assigns to a variable."""
    variable = module.Variable
    assign = getattr(variable, "_direct_assign", None)
    if assign is None or mentions(assign, "all_reduce"):
        yield unpatched("Variable._direct_assign", fixed=assign is not None)
        return
    variable._direct_assign = _patched_assign(news, trainer, assign)
    yield patched("Variable._direct_assign")


def _patched_assign(news: News, trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf
    named: set[str] = set()

    @functools.wraps(original)
    def _direct_assign(self: Any, value: Any) -> None:
        context = find_shared_context(trainer)
        if context is None:
            original(self, value)
            return
        is_own = _is_layers_own(self)
        if is_own or self.synchronization == "on_read":
            is_empty = find_empty(trainer)
            if is_empty is not None:  # the samples of an empty batch count nothing, and have no mean
                value = tf.where(is_empty, tf.convert_to_tensor(self._value), tf.cast(value, self._value.dtype))
        if is_own and can_merge(trainer):
            if self.path not in named:
                named.add(self.path)
                news.say(
                    f"averages {self.path} over the replicas: its layer assigns it in `call`, without an aggregation"
                )
            value = context.all_reduce("MEAN", tf.cast(value, self._value.dtype))
        original(self, value)

    return _direct_assign


def _is_layers_own(variable: Any) -> bool:
    """Whether a layer, while it is called, assigns to a state of its own and has not said how to aggregate it."""
    state: Any = sys.modules.get(GLOBAL_STATE)
    return (
        state is not None
        and state.get_global_attribute(CALL_CONTEXT) is not None
        and not variable.trainable
        and variable.aggregation == "none"
        and variable.synchronization != "on_read"
        and bool(variable._value.dtype.is_floating)
    )
