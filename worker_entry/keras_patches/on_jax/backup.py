"""Makes Keras's `BackupAndRestore` correct with several processes of JAX: the first process's backup counts.

In Keras, processes that share a path all write the same files at once, and fail on each other's locks. Processes that
do not share a path, or were killed between each other's backups, resume from different epochs.

With this patch, only the first process writes. Before training, it sends the files of its backup to the others, so that
all read the same: JAX sets the variables of several processes only if all of them do it, with the same values. So
processes may share the path, or use separate paths or disks.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.backup import PART, directed_to, finish_backup, read_seeds, write_whole
from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.on_jax.processes import add_up, broadcast, find_distribution, process_index
from worker_entry.keras_patches.source import change_callbacks, flatten_callbacks

PIECE = 64 << 20
"""The bytes of a file that are sent at once."""


def patch_backup_on_jax(trainer: Any, module: Any, news: News) -> Iterator[Finding]:
    """Replaces `fit` and faulty methods of the callback."""
    callback = module.BackupAndRestore
    names = ("_save_model", "on_train_begin", "on_train_end")
    change = functools.partial(_check_callbacks, trainer, callback)
    if not all(hasattr(callback, name) for name in names) or not change_callbacks(trainer, change):
        yield unpatched("BackupAndRestore", fixed=False)
        return
    save = callback._save_model
    callback._save_model = _by_first(trainer, save, functools.partial(write_whole, save))
    callback.on_train_begin = _patched_begin(trainer, callback.on_train_begin)
    callback.on_train_end = _by_first(trainer, callback.on_train_end, callback.on_train_end)
    yield patched("BackupAndRestore")


def _by_first(trainer: Any, original: Callable[..., None], of_first: Callable[..., None]) -> Callable[..., None]:
    """The method; of several processes, only the first does anything, by `of_first`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        if find_distribution(trainer) is None:
            original(self, *args, **kwargs)
        elif process_index() == 0:
            of_first(self, *args, **kwargs)

    return method


def _patched_begin(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if find_distribution(trainer) is None:
            original(self, logs)
            return
        with tempfile.TemporaryDirectory(prefix=PART) as received:
            if process_index() == 0:
                folder = os.fspath(self.backup_dir)
                finish_backup(folder)
                _send(folder)
                original(self, logs)
                read_seeds(self)
            else:
                _receive(received)
                with directed_to(self, received):
                    original(self, logs)
                    read_seeds(self)

    return on_train_begin


def _check_callbacks(trainer: Any, callback: Any, model: Any, callbacks: Any) -> Any:
    """Returns the callbacks for `fit`.

    Raises:
        ValueError: some processes have the callback, and others do not, which would wait for each other for ever.
    """
    if find_distribution(trainer) is None:
        return callbacks
    own = sum(isinstance(each, callback) for each in flatten_callbacks(trainer, callbacks))
    total, processes = add_up([own, 1])
    if own * processes != total:
        raise ValueError("BackupAndRestore has to be a callback of all processes, or of none")
    return callbacks


def _send(folder: str) -> None:
    """Sends the files of a folder, if it exists."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    files = [(name, os.path.join(folder, name)) for name in names if not name.startswith(PART)]
    files = [(name, path) for name, path in files if os.path.isfile(path)]
    table = json.dumps([(name, os.path.getsize(path)) for name, path in files]).encode()
    add_up([len(table)])
    broadcast(table)
    for _, path in files:
        with open(path, "rb") as stream:
            for piece in iter(functools.partial(stream.read, PIECE), b""):
                broadcast(piece)


def _receive(folder: str) -> None:
    """Writes the files that the first process sends."""
    (length,) = add_up([0])
    for name, size in json.loads(broadcast(bytes(length))):
        with open(os.path.join(folder, os.path.basename(name)), "wb") as stream:
            while stream.tell() < size:
                stream.write(broadcast(bytes(min(PIECE, size - stream.tell()))))
