"""Patches Keras 3's optimizers: `patching` describes the faults.

On several replicas, the gradients are reduced first, as in tf_keras. Then the values that are clipped, accumulated and
checked are the same on all replicas, and the same as in one process. TensorFlow does not allow a merge call inside a
condition. So the merge call comes first, the condition is evaluated once for all replicas, and its branches switch back
to each replica.
"""

from __future__ import annotations

import ast
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import calls_of, find_shared_context, mentions
from worker_entry.keras_patches.step import find_step

BACKEND = "keras.src.backend"
OPTIMIZER = "keras.src.backend.tensorflow.optimizer"
LOSS_SCALE_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer"

_PARTS = (
    "_all_reduce_sum_gradients",
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_reset_gradient_accumulators",
    "_backend_update_step",
    "_clip_gradients",
    "_get_variable_index",
    "_overwrite_model_variables_with_average_value",
    "_update_model_variables_moving_average",
)
"""The methods that `_backend_apply_gradients` uses."""

_thread = threading.local()
"""`_thread.reduced`: whether the gradients have been reduced already. Each replica has its own thread."""


def patch_optimizer(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces faulty methods in the base class of TensorFlow's optimizers."""
    optimizer = module.TFOptimizer
    yield _patch_apply(trainer, optimizer)
    update: Any = getattr(optimizer, "_backend_apply_gradients", None)
    is_known = update is not None and all(hasattr(optimizer, name) for name in _PARTS)
    if is_known and (_reduces_after_clipping(optimizer) or _merges_in_condition(update)):
        optimizer._backend_apply_gradients = _patched_update(trainer, update)
        optimizer._all_reduce_sum_gradients = _patched_reduce(optimizer._all_reduce_sum_gradients)
        yield patched("TFOptimizer._backend_apply_gradients")
    else:
        reduces_first = is_known and mentions(update, "_all_reduce_sum_gradients")
        yield unpatched("TFOptimizer._backend_apply_gradients", fixed=reduces_first)


def _patch_apply(trainer: Any, optimizer: Any) -> Finding:
    """Replaces `apply` if it creates variables in the graph that first calls it."""
    place = f"{optimizer.__name__}.apply"
    builds, outside = mentions(optimizer.apply, "build"), mentions(optimizer.apply, "init_scope")
    if not builds or outside:
        return unpatched(place, fixed=builds)
    optimizer.apply = _patched_apply(trainer, optimizer.apply)
    return patched(place)


def patch_loss_scale_optimizer(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces faulty methods of the optimizer."""
    optimizer = module.LossScaleOptimizer
    yield _patch_apply(trainer, optimizer)
    check = getattr(optimizer, "check_finite", None)
    if check is not None and not mentions(check, "all_reduce"):
        optimizer.check_finite = _patched_check_finite(trainer, check)
        yield patched("LossScaleOptimizer.check_finite")
    else:
        yield unpatched("LossScaleOptimizer.check_finite", fixed=check is not None)


def _patched_check_finite(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        context = find_shared_context(trainer)
        if context is None:
            return finite
        return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(finite), "float32")), 0)

    return check_finite


def _patched_apply(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built and tf.inside_function() and find_shared_context(trainer) is not None:
                # Variables created in a graph are initialized inside a condition, so the first step would run in it.
                with tf.init_scope(), sys.modules[BACKEND].name_scope(self.name, caller=self):
                    self.build(trainable_variables)
                self.built = True
        original(self, grads, trainable_variables)

    return apply


def _patched_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        step = find_step()
        if step is not None:
            step.reduces = True
        return grads_and_vars if getattr(_thread, "reduced", False) else original(self, grads_and_vars)

    return _all_reduce_sum_gradients


def _patched_update(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        context = find_shared_context(trainer)
        clips = self.clipnorm or self.clipvalue or self.global_clipnorm
        if context is None or not (clips or self.gradient_accumulation_steps or self.use_ema):
            original(self, grads, trainable_variables)
            return
        # No strict=, which Python 3.9 lacks.
        pairs = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables)))  # noqa: B905
        gradients = [gradient for gradient, _ in pairs]
        if self.gradient_accumulation_steps:
            _merge_replicas(tf, context, functools.partial(_accumulate, tf, self, trainable_variables), gradients)
        else:
            _update(self, trainable_variables, gradients)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                _merge_replicas(tf, context, functools.partial(_overwrite, tf, self), [])

    return _backend_apply_gradients


CallEach = Callable[[Callable[..., None]], Any]
"""Calls a function in every replica, with the replica's gradients."""


def _merge_replicas(tf: Any, context: Any, work: Callable[[CallEach], None], gradients: list[Any]) -> None:
    """Calls `work` once for all replicas, in a merge call."""
    if tf.__internal__.distribute.strategy_supports_no_merge_call():  # XLA on GPUs, where each replica runs separately
        work(lambda step: step(gradients))
        return

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def merge(strategy: Any, gradients: Any) -> None:
        work(lambda step: strategy.extended.call_for_each_replica(step, args=(gradients,)))

    context.merge_call(merge, args=(gradients,))


def _update(optimizer: Any, variables: Any, gradients: list[Any]) -> None:
    """Updates the variables with reduced gradients."""
    gradients = optimizer._clip_gradients(gradients)
    optimizer._apply_weight_decay(variables)
    _thread.reduced = True
    try:
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
    finally:
        _thread.reduced = False


def _accumulate(tf: Any, optimizer: Any, variables: Any, call_each: CallEach) -> None:
    """Accumulates the gradients, or updates the variables with the mean of the accumulated ones."""
    steps = optimizer.gradient_accumulation_steps
    accumulators = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # as above
    def update(gradients: Any) -> None:
        means = [(new + old) / steps for new, old in zip(gradients, accumulators)]  # noqa: B905
        _update(optimizer, variables, means)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # as above
    def add(gradients: Any) -> None:
        optimizer._backend_increment_gradient_accumulators(gradients, accumulators)

    def update_all() -> None:
        call_each(update)
        optimizer._backend_reset_gradient_accumulators()

    def add_all() -> None:
        call_each(add)

    tf.cond(tf.equal((optimizer._iterations + 1) % steps, 0), update_all, add_all)


def _overwrite(tf: Any, optimizer: Any, _: CallEach) -> None:
    """Replaces the variables with their moving averages, if due."""

    def overwrite() -> None:
        optimizer._overwrite_model_variables_with_average_value(optimizer._trainable_variables)

    is_due = tf.equal((optimizer.iterations + 1) % optimizer.ema_overwrite_frequency, 0)
    tf.cond(is_due, overwrite, lambda: None)


def _reduces_after_clipping(optimizer: Any) -> bool:
    """Whether each replica clips its own gradients before they are reduced."""
    return (
        mentions(optimizer._backend_apply_gradients, "_clip_gradients")
        and not mentions(optimizer._backend_apply_gradients, "_all_reduce_sum_gradients")
        and mentions(optimizer._backend_update_step, "_all_reduce_sum_gradients")
    )


def _merges_in_condition(apply: Callable[..., None]) -> bool:
    """Whether the source has `….cond(is_update_step, …)` or `….cond(should_overwrite_model_vars, …)`."""
    conditions = ("is_update_step", "should_overwrite_model_vars")
    return any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id in conditions
        for call in calls_of(apply, "cond")
    )
