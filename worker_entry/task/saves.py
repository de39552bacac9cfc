"""Notes each checkpoint that the program writes, when it is written and before the program goes on.

A write within another one, such as the arrays of a model, is part of it.
"""

from __future__ import annotations

import functools
import glob
import os
import threading
from collections.abc import Callable
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import

WRITERS = {
    "keras.src.saving.saving_lib": ("save_model", "save_weights_only"),
    "keras.src.legacy.saving.legacy_h5_format": ("save_model_to_hdf5",),
    "tensorflow.python.checkpoint.checkpoint": ("TrackableSaver.save",),
    "numpy": ("save", "savez", "savez_compressed"),
    "pickle": ("dump",),
}
"""Functions that write a checkpoint, by module."""
PATH_FIRST = ("numpy",)
"""Modules whose functions take the path first; the others take an object, and then the path."""
_thread = threading.local()
_watchers: list[Callable[[str], None]] = []


def watch(then: Callable[[str], None]) -> None:
    """Calls `then` with the path of each checkpoint, before those that watch already.

    What it raises reaches the program, as a failed write does.
    """
    if not _watchers:
        for name, functions in WRITERS.items():
            after_import(name, functools.partial(_watch_module, name, functions))
    _watchers.insert(0, then)


def find_parts(path: str) -> list[str]:
    """The files of a checkpoint: one file, those of a folder, or those that begin with a prefix of TensorFlow's."""
    if os.path.isdir(path):
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return [path] if os.path.isfile(path) else sorted(glob.glob(f"{glob.escape(path)}.*"))


def _watch_module(name: str, functions: tuple[str, ...], module: Any) -> None:
    place = 0 if name in PATH_FIRST else 1
    for function in functions:
        *outer, last = function.split(".")
        owner: Any = module
        for part in outer:
            owner = getattr(owner, part, None)
        if owner is not None and hasattr(owner, last):
            setattr(owner, last, _watched(getattr(owner, last), place))


def _watched(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "writes", False):
            return original(*args, **kwargs)
        _thread.writes = True
        try:
            result = original(*args, **kwargs)
        finally:
            _thread.writes = False
        given = args[place] if len(args) > place else next(iter(kwargs.values()), None)
        path = _find_path(given)
        if path is not None:
            for then in _watchers:
                then(path)
        return result

    return write


def _find_path(given: Any) -> Optional[str]:
    """The path of what was written; None if it is no file, such as a buffer in memory."""
    if hasattr(given, "flush") and hasattr(given, "name"):
        given.flush()
        given = given.name
    if not isinstance(given, (str, os.PathLike)):
        return None
    path = os.fspath(given)
    return next((each for each in (path, f"{path}.npz", f"{path}.npy") if find_parts(each)), None)
