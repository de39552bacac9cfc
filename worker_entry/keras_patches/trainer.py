"""Patches Keras 3's TensorFlow trainer: `patching` describes the faults."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Optional

from worker_entry.keras_patches.source import calls_of, is_constant, is_multi_worker

MODEL = "keras.src.models.model"
TRAINER = "keras.src.backend.tensorflow.trainer"


def patch_trainer(trainer: Any, module: Any) -> list[str]:
    """Replaces faulty functions of the trainer's module (both arguments); returns their names."""
    patched = []
    trainer_class = module.TensorFlowTrainer
    build = getattr(trainer_class, "_maybe_symbolic_build", None)
    if build is not None and _calls_reduce(build, reduction="MEAN", axis=None):
        trainer_class._maybe_symbolic_build = _patched_build(trainer, build)
        patched.append("_maybe_symbolic_build")
    reduce = module.reduce_per_replica
    if _calls_reduce(reduce, reduction="MEAN", axis=0):
        module.reduce_per_replica = _patched_reduce(trainer, reduce)
        patched.append("reduce_per_replica")
    make = getattr(trainer_class, "_make_function", None)
    if make is not None and _calls_function_in_loop(make):
        trainer_class._make_function = _patched_make_function(trainer, make)
        patched.append("_make_function")
    return patched


def _patched_build(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if _has_no_call(self):
            return  # as without a strategy: the parts are built when the train_step is traced
        strategy = self._distribute_strategy
        if iterator is not None and strategy is not None and is_multi_worker(trainer, strategy):
            iterator = _LocalBatches(trainer, strategy, iterator)
        original(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


def _has_no_call(model: Any) -> bool:
    """Whether the model cannot be called, such as a GAN with its own train_step."""
    base = getattr(sys.modules.get(MODEL), "Model", None)
    return base is not None and getattr(type(model), "call", None) is base.call


class _LocalBatches:
    """Wraps a Keras epoch iterator; yields the first local replica's part of each batch."""

    def __init__(self, trainer: Any, strategy: Any, iterator: Any) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._iterator = iterator

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        map_structure = self._trainer.tree.map_structure
        for *numbers, batches in self._iterator:
            yield (*numbers, (map_structure(self._first_local, batch) for batch in batches))

    def _first_local(self, value: Any) -> Any:
        if isinstance(value, self._trainer.tf.distribute.DistributedValues):
            return self._strategy.experimental_local_results(value)[0]
        return value


def _patched_reduce(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        # "auto" means "mean" here: Keras chooses something else only for TPUs.
        if reduction in ("auto", "mean") and is_multi_worker(trainer, strategy):
            return trainer.tree.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _patched_make_function(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_function(self: Any, step_function: Callable[..., Any]) -> Any:
        in_loop = self.steps_per_execution > 1 and not (self.run_eagerly or self.jit_compile)
        if not in_loop or self.distribute_strategy.num_replicas_in_sync == 1:
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
    return bool(calls_of(make, "while_loop")) and any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "one_step_on_data"
        for call in calls_of(make, "function")
    )
