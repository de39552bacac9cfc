"""Patches Keras 3's losses: `patching` describes the faults.

Several replicas train as one process does if the gradient of each replica's mean is divided by the number of replicas,
because the gradients are added up. Keras divides the value of the loss, and multiplies it again where it reports the
loss itself. So every other use of this value is wrong: logs of a custom train_step, the square root of a loss. With
this patch, a loss in a step of Keras keeps its value, and only its gradient is divided.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import find_common_trainer, find_shared_context, find_trainer, mentions
from worker_entry.keras_patches.step import Step, find_step, without_nan

LOSS = "keras.src.losses.loss"


def patch_losses(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces functions that scale and add up losses."""
    adding = ((find_common_trainer(), "_compute_loss"), (find_trainer(trainer), "_aggregate_additional_loss"))
    if not scales_losses(module):
        # A value that is divided has to be multiplied again somewhere.
        fixed = not hasattr(module, "unscale_loss_for_distribution")
        for place in ("scale_loss_for_distribution", "reduce_values", *(name for _, name in adding)):
            yield unpatched(place, fixed=fixed)
        return
    module.scale_loss_for_distribution = _patched_scale(trainer, module.scale_loss_for_distribution)
    module.unscale_loss_for_distribution = _patched_unscale(module.unscale_loss_for_distribution)
    module.reduce_values = _patched_reduce(trainer, module, module.reduce_values)
    yield patched("scale_loss_for_distribution")
    yield patched("reduce_values")
    for base, name in adding:
        original = getattr(base, name, None)
        if original is None:
            yield unpatched(name, fixed=False)
        else:
            setattr(base, name, _without_nan(trainer, original))
            yield patched(name)


def scales_losses(module: Any) -> bool:
    """Whether Keras divides the value of a loss by the number of replicas."""
    names = ("reduce_values", "scale_loss_for_distribution", "unscale_loss_for_distribution")
    return all(hasattr(module, name) for name in names) and mentions(module.scale_loss_for_distribution, "multiply")


def say_if_unscaled(trainer: Any, model: Any, step: Step, say: Callable[[str], None]) -> None:
    """Warns if a model's own training step adds up unscaled gradients of the replicas."""
    bases = {"train_step": find_trainer(trainer), "compute_loss": find_common_trainer()}
    functions = {name: getattr(type(model), name) for name in bases}
    own = [function for name, function in functions.items() if function is not getattr(bases[name], name)]
    if step.is_scaled or not step.reduces or not own or any(_mentions_replicas(function) for function in own):
        return
    count = model.distribute_strategy.num_replicas_in_sync
    say(
        f"{own[0].__qualname__} trains with {count} times the gradient of one process: "
        "divide its loss by strategy.num_replicas_in_sync"
    )


def _mentions_replicas(function: Any) -> bool:
    try:
        text = inspect.getsource(function).lower()
    except (OSError, TypeError):
        return True  # unknown
    return "replica" in text or "compute_average_loss" in text


def _patched_scale(trainer: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def scale_loss_for_distribution(value: Any) -> Any:
        context = find_shared_context(trainer)
        step = find_step()
        if context is None or step is None:
            return original(value)
        step.is_scaled = True
        share = 1.0 / context.num_replicas_in_sync

        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def scaled(value: Any) -> Any:
            return tf.identity(value), lambda upstream: upstream * tf.cast(share, upstream.dtype)

        return scaled(value)

    return scale_loss_for_distribution


def _patched_unscale(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def unscale_loss_for_distribution(value: Any) -> Any:
        return original(value) if find_step() is None else value

    return unscale_loss_for_distribution


def _patched_reduce(trainer: Any, module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reduce_values(values: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(values, *args, **kwargs)
        arguments = signature.bind(values, *args, **kwargs)
        arguments.apply_defaults()
        reduction = arguments.arguments["reduction"]
        context = find_shared_context(trainer)
        if context is None or reduction in (None, "none"):
            return loss
        if reduction == "sum":
            # The logs of the replicas are averaged, and the gradients added up.
            if find_step() is None:
                return loss
            loss = loss * trainer.tf.cast(context.num_replicas_in_sync, loss.dtype)
            return module.scale_loss_for_distribution(loss)
        if len(values.shape) == 0:
            loss = module.scale_loss_for_distribution(loss)  # a function of the user has computed the mean
        return without_nan(trainer, loss)

    return reduce_values


def _without_nan(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        if loss is None or find_step() is None:
            return loss
        return without_nan(trainer, trainer.tf.convert_to_tensor(loss))

    return compute
