"""Makes Keras 3 save atomically, so that several workers may save to the same path.

With several workers, a script calls `model.save(path)`, `save_weights` or `export` on each of them. Keras writes to
the path directly: workers that share the path fail on each other's locks and folders, or read incomplete files.

With this patch, each worker writes to its own folder beside the destination, and renames the complete files. The last
worker's file remains. All files have the same content or, in a SavedModel, at least the same numbers for the same
variables, so that files of different workers fit together. No worker waits for another, so a script may also save on
only one worker, or on each worker to its own path. Every worker can read the path as soon as its own call has returned.

A process that is killed while it saves leaves its folder behind; that worker's next save to the path removes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.hooks import jax_cluster, own_tf_config
from worker_entry.hooks.jax_time import TRAINER as JAX_TRAINER
from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.on_jax.processes import alone, process_index

SAVING = "keras.src.saving.saving_lib"
LEGACY = "keras.src.legacy.saving.legacy_h5_format"
EXPORT = "keras.src.export.saved_model"
MESSAGES = "keras.src.utils.io_utils"
FIND_VARIABLES = "_filter_and_track_resources"
"""The method of an archive that collects and numbers the variables to save."""
PART = ".saving-"
"""Prefix of folders with incomplete files."""
LAST = (".json", ".pb")
"""Suffixes of files through which readers find the other files; they are renamed last."""


def patch_saving(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces the functions that write models."""
    if hasattr(module, "save_model") and hasattr(module, "save_weights_only"):
        # `keras.saving.saving_api`, whose functions have several public names, calls these through their module.
        module.save_model = _patched_save(trainer, module.save_model, lambda options: not options.get("zipped", True))
        module.save_weights_only = _patched_save(trainer, module.save_weights_only, lambda _: False)
        yield patched("Model.save")
    else:
        yield unpatched("Model.save", fixed=False)
    legacy: Any = sys.modules.get(LEGACY)
    if legacy is not None and hasattr(legacy, "save_model_to_hdf5"):
        legacy.save_model_to_hdf5 = _patched_save(trainer, legacy.save_model_to_hdf5, lambda _: True)
    archives = _archives(sys.modules.get(EXPORT))
    for archive in archives:
        archive.write_out = _patched_write(archive.write_out)
        if hasattr(archive, FIND_VARIABLES):
            setattr(archive, FIND_VARIABLES, _patched_find(getattr(archive, FIND_VARIABLES)))
    yield patched("Model.export") if archives else unpatched("Model.export", fixed=False)


def _archives(module: Any) -> list[Any]:
    """The classes that write a SavedModel: the module's classes and their bases."""
    classes = [value for value in vars(module).values() if isinstance(value, type)] if module is not None else []
    bases = dict.fromkeys(base for each in classes for base in each.__mro__)
    return [base for base in bases if "write_out" in vars(base)]


def _patched_save(
    trainer: Any, original: Callable[..., Any], makes_folders: Callable[[dict[str, Any]], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(model: Any, filepath: Any, *args: Any, **options: Any) -> Any:
        with written_whole(filepath, make_folders=makes_folders(options)) as path, _alone_on_jax(trainer):
            return original(model, path, *args, **options)

    return save


def _patched_write(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write_out(self: Any, filepath: Any, *args: Any, **options: Any) -> Any:
        with written_whole(filepath, make_folders=True) as path, _shown_as(path, filepath):
            return original(self, path, *args, **options)

    return write_out


def _patched_find(original: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers the variables of a SavedModel in the order of the model.

    Unpatched, Keras takes them from a set, in the order of their memory addresses: each worker numbers them
    differently, and the files of one worker do not fit those of another.
    """

    @functools.wraps(original)
    def find(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        found = getattr(self._tf_trackable, "_all_variables", None)
        if isinstance(found, list):
            models = getattr(self, "_tracked", [])
            known = [variable for model in models for variable in getattr(model, "variables", ())]
            places = {id(part): place for place, variable in enumerate(known) for part in _parts_of(variable)}

            def order(variable: Any) -> tuple[int, str, str]:
                return places.get(id(variable), len(places)), str(variable.name), str(variable.shape)

            self._tf_trackable._all_variables = sorted(found, key=order)
        return result

    return find


def _parts_of(variable: Any) -> Iterator[Any]:
    """A variable of Keras, its TensorFlow variable, and those of the replicas."""
    value = getattr(variable, "value", variable)
    yield variable
    yield value
    yield from getattr(value, "_values", ())


def _alone_on_jax(trainer: Any) -> contextlib.AbstractContextManager[None]:
    return alone(trainer) if trainer is sys.modules.get(JAX_TRAINER) else contextlib.nullcontext()


@contextlib.contextmanager
def written_whole(path: Any, *, make_folders: bool) -> Iterator[Any]:
    """Yields a temporary path to write to; afterwards renames the written files to `path`.

    Yields `path` itself if renaming is not possible (an object store, a device, a folder that is not writable) or not
    necessary because this is not a cluster.
    """
    part = ""
    if _own_name() and isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path):
        destination = os.path.realpath(os.fspath(path))
        folder, name = os.path.split(destination)
        if make_folders:
            os.makedirs(folder, exist_ok=True)
        if not os.path.exists(destination) or os.path.isfile(destination) or os.path.isdir(destination):
            part = _make_part(folder, name)
    if not part:
        yield path
        return
    try:
        yield os.path.join(part, name)
        _move(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make_part(folder: str, name: str) -> str:
    part = os.path.join(folder, f"{PART}{_own_name()}-{name}")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    try:
        os.mkdir(part)
    except OSError:
        return ""
    return part


def _own_name() -> str:
    """A name that is unique to this worker and survives a restart; empty outside a cluster."""
    try:
        task = own_tf_config.read()["task"]
        return f"{task['type']}-{task['index']}"
    except (KeyError, TypeError):
        return f"worker-{process_index()}" if jax_cluster.is_connected() else ""


def _move(source: str, target: str) -> None:
    with os.scandir(source) as entries:
        # In this order, readers find either nothing or everything.
        ordered = sorted(entries, key=lambda entry: (not entry.is_dir(), entry.name.endswith(LAST), entry.name))
    for entry in ordered:
        path = os.path.join(target, entry.name)
        if entry.is_dir():
            os.makedirs(path, exist_ok=True)
            _move(entry.path, path)
        else:
            os.replace(entry.path, path)


@contextlib.contextmanager
def _shown_as(path: Any, shown: Any) -> Iterator[None]:
    """Makes Keras's messages name the path `shown` instead of `path`."""
    messages = sys.modules.get(MESSAGES)
    show = getattr(messages, "print_msg", None)
    if messages is None or show is None:
        yield
        return

    def print_msg(message: Any, *args: Any, **options: Any) -> Any:
        return show(str(message).replace(str(path), str(shown)), *args, **options)

    messages.print_msg = print_msg  # type: ignore[attr-defined]  # a module of Keras
    try:
        yield
    finally:
        messages.print_msg = show  # type: ignore[attr-defined]
