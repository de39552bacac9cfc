"""Patches Keras 3's random numbers: `patching` describes the fault.

The state of a `SeedGenerator` is the same in all replicas, so that each replica draws the same numbers: the same mask
of `Dropout` for its own samples, the same noise. With this patch, the seed that a replica gets also depends on the
replica's number, and in a map of tf.data, on the worker's number. The state stays as it is, so that checkpoints and
training in one process do not change.

Everything else that is random stays equal in all workers: the initial weights, and seeds of TensorFlow, NumPy and
Python, by which workers divide the data.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.hooks.import_hooks import after_import
from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import find_module, find_shared_context, worker_number
from worker_entry.keras_patches.variables import VARIABLE

SEED_GENERATOR = "keras.src.random.seed_generator"
STRUCTURED_FUNCTION = "tensorflow.python.data.ops.structured_function"
MAP = "Dataset.map()"
"""tf.data's name for a map, including a parallel one."""

_thread = threading.local()
"""`_thread.maps`: how many maps of tf.data this thread traces; `_thread.initializing`: how many variables it makes."""


def patch_seeds(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces the function that draws a seed."""
    place = "SeedGenerator.next"
    generator = getattr(module, "SeedGenerator", None)
    variable: Any = getattr(find_module(VARIABLE), "Variable", None)
    draw = getattr(generator, "next", None)
    fixed = draw is not None and "replica" in inspect.getsource(draw)
    needed = hasattr(module, "global_seed_generator") and hasattr(variable, "_deferred_initialize")
    if generator is None or draw is None or fixed or not needed:
        yield unpatched(place, fixed=fixed)
        return
    generator.next = _patched_next(trainer, draw)
    module.global_seed_generator = _patched_global(trainer, module.global_seed_generator)
    # Variables that are created in a step get the same initial values in all replicas.
    variable.__init__ = _counted("initializing", variable.__init__)
    variable._deferred_initialize = _counted("initializing", variable._deferred_initialize)
    if worker_number() > 0:
        after_import(STRUCTURED_FUNCTION, _watch_maps)
    yield patched(place)


def _patched_next(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def next(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001 - its name in Keras
        seed = original(self, *args, **kwargs)
        if _is_counted("initializing"):
            return seed
        context = find_shared_context(trainer)
        if context is not None:
            return tf.random.experimental.stateless_fold_in(seed, context.replica_id_in_sync_group)
        if _is_counted("maps"):
            return tf.random.experimental.stateless_fold_in(seed, worker_number())
        return seed

    return next


class _Unseeded:
    """Draws seeds from TensorFlow, in the place of Keras's global generator.

    Keras keeps this generator for each thread, and a replica has a thread of its own: it would create a variable in
    each step. TensorFlow's numbers depend on its seed, which `keras.utils.set_random_seed` sets.
    """

    def __init__(self, tf: Any, replica: Any) -> None:
        self._tf = tf
        self._replica = replica

    def next(self, ordered: bool = True) -> Any:
        seed = self._tf.random.uniform([2], maxval=2**31 - 1, dtype=self._tf.int64)
        return self._tf.random.experimental.stateless_fold_in(seed, self._replica)


def _patched_global(trainer: Any, original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(original)
    def global_seed_generator() -> Any:
        context = find_shared_context(trainer)
        if context is None or _is_counted("initializing"):
            return original()
        return _Unseeded(trainer.tf, context.replica_id_in_sync_group)

    return global_seed_generator


def _watch_maps(module: Any) -> None:
    wrapper = getattr(module, "StructuredFunctionWrapper", None)
    if wrapper is None:
        return
    original = wrapper.__init__

    @functools.wraps(original)
    def initialize(self: Any, func: Any, transformation_name: Any, *args: Any, **kwargs: Any) -> None:
        with _count("maps") if transformation_name == MAP else contextlib.nullcontext():
            original(self, func, transformation_name, *args, **kwargs)

    wrapper.__init__ = initialize


def _counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _count(name):
            return original(*args, **kwargs)

    return call


@contextlib.contextmanager
def _count(name: str) -> Iterator[None]:
    setattr(_thread, name, getattr(_thread, name, 0) + 1)
    try:
        yield
    finally:
        setattr(_thread, name, getattr(_thread, name) - 1)


def _is_counted(name: str) -> bool:
    return getattr(_thread, name, 0) > 0
