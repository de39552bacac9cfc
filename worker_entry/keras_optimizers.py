"""Patches of Keras 3's optimizers: see `keras_support` for the faults."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from worker_entry.keras_source import calls_of, is_multi_worker

OPTIMIZER = "keras.src.optimizers.base_optimizer"
LOSS_SCALE_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer"


def mend_optimizer(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in all optimizers' base; returns the names of what it replaced."""
    optimizer = module.BaseOptimizer
    apply = getattr(optimizer, "_backend_apply_gradients", None)
    if apply is None or not _updates_in_condition(apply):
        return []
    optimizer._backend_apply_gradients = _mended_apply(trainer, apply)
    return ["BaseOptimizer._backend_apply_gradients"]


def mend_loss_scale_optimizer(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in the optimizer; returns the names of what it replaced."""
    optimizer = module.LossScaleOptimizer
    check = getattr(optimizer, "check_finite", None)
    if check is None or calls_of(check, "all_reduce"):
        return []
    optimizer.check_finite = _mended_check_finite(trainer, check)
    return ["LossScaleOptimizer.check_finite"]


def _mended_check_finite(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not is_multi_worker(trainer, context.strategy):
            return finite
        return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(finite), "float32")), 0)

    return check_finite


def _mended_apply(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        context = tf.distribute.get_replica_context()
        if not self.gradient_accumulation_steps or context is None or not is_multi_worker(trainer, context.strategy):
            original(self, grads, trainable_variables)
            return
        interim = tf.__internal__.distribute.interim

        def apply_together(_: Any, gradients: Any) -> None:
            # Where all replicas have met already, what the original asks them to meet for is done at once.
            meet, interim.maybe_merge_call = interim.maybe_merge_call, lambda do, strategy, *rest: do(strategy, *rest)
            try:
                original(self, gradients, trainable_variables)
            finally:
                interim.maybe_merge_call = meet

        pairs = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables)))  # noqa: B905 - Python 3.9 has no strict
        context.merge_call(apply_together, args=([gradient for gradient, _ in pairs],))

    return _backend_apply_gradients


def _updates_in_condition(apply: Callable[..., None]) -> bool:
    """Whether the source has `….cond(is_update_step, …)`, in which the optimizer reduces the gradients."""
    return any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "is_update_step"
        for call in calls_of(apply, "cond")
    )
