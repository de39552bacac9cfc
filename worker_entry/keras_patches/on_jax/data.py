"""Makes Keras on JAX train on any data with the batches of one process.

Keras shares out the batches of a `tf.data.Dataset` among the processes, and refuses all other data: each process would
have to select its own part. Its way of sharing cuts the data set into smaller batches and deals them out in turn. If
the last batch is smaller than the others, one process may get a batch more than another, and then waits for ever. And
`predict` fails, because no process has the results of all.

With this patch, each process reads every batch, and keeps the rows of its own devices; Keras reads every batch of a
data set anyway. A batch whose rows cannot be shared out evenly is trained on whole by every device, with the same
result. `predict` returns the results of all processes on each of them.

A program that turns `auto_shard_dataset` off selects its own data, and is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.on_jax.processes import find_distribution, gather
from worker_entry.keras_patches.source import find_trainer

DATA_ADAPTERS = "keras.src.trainers.data_adapters"


def patch_data(trainer: Any, module: Any, _: News) -> Iterator[Finding]:
    """Replaces the functions that select a reader for the data, and that place a batch on the devices."""
    select, place = getattr(module, "get_data_adapter", None), getattr(trainer, "_distribute_data", None)
    if select is None or place is None:
        yield unpatched("data", fixed=False)
        return
    module.get_data_adapter = _patched_select(trainer, select)
    trainer._distribute_data = _patched_place(trainer, place)
    yield patched("data")


def patch_predict(trainer: Any, _: Any, __: News) -> Iterator[Finding]:
    """Replaces the method that makes the function of a step of `predict`."""
    trainer_class = find_trainer(trainer)
    make = getattr(trainer_class, "make_predict_function", None)
    if make is None:
        yield unpatched("predict", fixed=False)
        return
    trainer_class.make_predict_function = _patched_make(trainer, make)
    yield patched("predict")


def _find_shared(trainer: Any) -> Any:
    """The distribution whose processes all read the same batches; None if there is none."""
    distribution = find_distribution(trainer)
    return distribution if getattr(distribution, "auto_shard_dataset", False) else None


def _patched_select(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        distribution = _find_shared(trainer)
        with _as_if_selected(distribution) if distribution is not None else contextlib.nullcontext():
            return original(*args, **kwargs)

    return get_data_adapter


@contextlib.contextmanager
def _as_if_selected(distribution: Any) -> Iterator[None]:
    """Lets Keras take any data as they are, for as long as it selects their reader."""
    distribution.auto_shard_dataset = False
    try:
        yield
    finally:
        distribution.auto_shard_dataset = True


def _patched_place(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _distribute_data(data: Any, layouts: Any = None) -> Any:
        distribution = _find_shared(trainer)
        if distribution is None:
            return original(data, layouts)
        return trainer.tree.map_structure(functools.partial(_place, trainer.jax, distribution), data)

    return _distribute_data


def _place(jax: Any, distribution: Any, batch: Any) -> Any:
    """The batch on the devices of all processes; each has all of its rows."""
    if batch is None:
        return None
    shape = tuple(batch.shape)
    layout = distribution.get_data_layout(shape)
    sharding = getattr(layout, "backend_layout", layout)
    try:
        sharding.shard_shape(shape)
    except ValueError:  # the devices cannot get equal parts
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    rows = batch if isinstance(batch, jax.Array) else sys.modules["numpy"].asarray(batch)
    return jax.make_array_from_callback(shape, sharding, rows.__getitem__)


def _patched_make(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_predict_function(self: Any, force: bool = False) -> Any:
        before, made = self.predict_function, original(self, force=force)
        if self.predict_function is before or find_distribution(trainer) is None:
            return made
        self.predict_function = _gathering(trainer, self.predict_function)
        return self.predict_function

    return make_predict_function


def _gathering(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def predict(state: Any, iterator: Any) -> Any:
        outputs, state = original(state, iterator)
        return trainer.tree.map_structure(functools.partial(_gather, trainer.jax), outputs), state

    return predict


def _gather(jax: Any, output: Any) -> Any:
    if not isinstance(output, jax.Array) or output.is_fully_addressable or output.is_fully_replicated:
        return output
    return gather(output)
