"""Patches Keras 3's TensorFlow trainer: `patching` describes the faults."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Optional

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.losses import LOSS, say_if_unscaled, scales_losses
from worker_entry.keras_patches.metrics import is_common
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.reading import Unread, patched_build, patched_get_iterator
from worker_entry.keras_patches.scope import move_into_scope
from worker_entry.keras_patches.source import calls_of, find_trainer, is_constant, is_multi_worker, mentions
from worker_entry.keras_patches.step import Step, in_step
from worker_entry.keras_patches.whole_batches import (
    divide,
    keeps_predictions,
    patched_make_predict_function,
    patched_predict,
)

TRAINER = "keras.src.backend.tensorflow.trainer"


def patch_trainer(trainer: Any, module: Any, news: News) -> Iterator[Finding]:
    """Replaces faulty functions of the trainer's module (both arguments)."""
    trainer_class = find_trainer(module)
    if patch_building(trainer):
        epoch_iterator = module.TFEpochIterator
        epoch_iterator._get_iterator = patched_get_iterator(trainer, epoch_iterator._get_iterator)
        yield patched("_maybe_symbolic_build")
    else:
        build = getattr(trainer_class, "_maybe_symbolic_build", None)
        yield unpatched("_maybe_symbolic_build", fixed=build is not None and mentions(build, "element_spec"))
    predict = getattr(trainer_class, "predict_on_batch", None)
    # Without the strategy, it cannot divide the batch.
    if predict is not None and mentions(predict, "predict_function") and not mentions(predict, "distribute_strategy"):
        make = trainer_class.make_predict_function
        trainer_class.make_predict_function = patched_make_predict_function(trainer, make)
        trainer_class.predict = patched_predict(trainer_class.predict)
        yield patched("make_predict_function")
    else:
        yield unpatched("make_predict_function", fixed=predict is not None and mentions(predict, "distribute_strategy"))
    reduce = module.reduce_per_replica
    if _calls_reduce(reduce, reduction="MEAN", axis=0):
        module.reduce_per_replica = _patched_reduce(trainer, reduce)
        yield patched("reduce_per_replica")
    else:
        yield unpatched("reduce_per_replica", fixed=_calls_reduce(reduce, reduction="MEAN", axis=None))
    make = getattr(trainer_class, "_make_function", None)
    loops = make is not None and _calls_function_in_loop(make)
    if make is not None and (loops or scales_losses(sys.modules.get(LOSS))):
        trainer_class._make_function = _patched_make_function(trainer, make, news, loops=loops)
        yield patched("_make_function")
    else:
        yield unpatched("_make_function", fixed=make is not None and mentions(make, "while_loop"))


def patch_building(trainer: Any) -> bool:
    """Replaces the function that reads a batch to build a model, even under a strategy of one device."""
    trainer_class = find_trainer(trainer)
    build = getattr(trainer_class, "_maybe_symbolic_build", None)
    if build is None or not mentions(build, "next"):
        return False
    trainer_class._maybe_symbolic_build = patched_build(trainer, build)
    return True


def _patched_reduce(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        def own(value: Any) -> Any:
            return trainer.concat(strategy.experimental_local_results(value))

        def mean(value: Any) -> Any:
            local = strategy.experimental_local_results(value)
            return local[0] if is_common(local) else strategy.reduce("MEAN", value, axis=None)

        if reduction == "concat" and keeps_predictions():
            return trainer.tree.map_structure(own, values)
        # "auto" means "mean" here: Keras chooses something else only for TPUs.
        if reduction in ("auto", "mean") and is_multi_worker(trainer, strategy):
            return trainer.tree.map_structure(mean, values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _patched_make_function(
    trainer: Any, original: Callable[..., Any], news: News, *, loops: bool
) -> Callable[..., Any]:
    said: set[type] = set()

    @functools.wraps(original)
    def _make_function(self: Any, step_function: Callable[..., Any]) -> Any:
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return original(self, step_function)
        move_into_scope(trainer, self)
        make = _make_in_loop if loops and self.steps_per_execution > 1 else original
        function = make(self, in_step(trainer, step_function, functools.partial(end_step, self, step_function)))

        def on_batches(iterator: Any) -> Any:
            if isinstance(iterator, Unread):
                return function(iterator.begin())
            if isinstance(iterator, (trainer.tf.data.Iterator, trainer.tf.distribute.DistributedIterator)):
                return function(iterator)
            return function(divide(trainer, strategy, iterator))

        return on_batches

    def end_step(model: Any, step_function: Any, step: Step) -> None:
        if getattr(step_function, "__name__", "") == "train_step" and type(model) not in said:
            said.add(type(model))
            say_if_unscaled(trainer, model, step, news.say)

    def _make_in_loop(self: Any, step_function: Callable[..., Any]) -> Any:
        if self.run_eagerly or self.jit_compile:
            return original(self, step_function)
        # With run_eagerly, Keras omits all its tf.functions; the outer one, around the loop, is added again below.
        self.run_eagerly = True
        try:
            function = original(self, step_function)
        finally:
            self.run_eagerly = False
        cell = function.__closure__[function.__code__.co_freevars.index("multi_step_on_iterator")]
        cell.cell_contents = trainer.tf.function(cell.cell_contents, reduce_retracing=True)
        return function

    return _make_function


def _calls_reduce(function: Callable[..., Any], *, reduction: str, axis: Optional[int]) -> bool:
    """Whether the function's source has a call `….reduce(<reduction>, value, axis=<axis>)`."""
    return any(
        len(call.args) == 2
        and is_constant(call.args[0], reduction)
        and any(keyword.arg == "axis" and is_constant(keyword.value, axis) for keyword in call.keywords)
        for call in calls_of(function, "reduce")
    )


def _calls_function_in_loop(make: Callable[..., Any]) -> bool:
    """Whether the source has `….while_loop(…)` and `….function(one_step_on_data, …)`."""
    return mentions(make, "while_loop") and any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "one_step_on_data"
        for call in calls_of(make, "function")
    )
