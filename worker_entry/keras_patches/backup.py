"""Makes Keras 3's `BackupAndRestore` correct with several workers: the chief's backup counts, and all workers get it.

In Keras, workers that share a path all write the same files at once, and each worker reads the files that it finds.
Workers that do not share a path, or were killed between each other's backups, resume from different epochs. A worker
that is killed while it writes leaves an unreadable file. And no file of Keras has the state of its random generators:
after a restart, `Dropout` draws the numbers of the first steps again.

With this patch, only the chief reads and writes, and it renames complete files. Before training, it sends the epoch and
all variables of its backup to the other workers over the network. So workers may share the path, or use separate paths
or disks; only the chief's backup must exist when the cluster is started again. Only the chief needs the
callback: on every worker, `fit` adds a callback that shares the backup.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.collectives import add_up, broadcast
from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.peers import find_peers
from worker_entry.keras_patches.source import (
    CALLBACK,
    change_callbacks,
    flatten_callbacks,
    is_random_state,
    number_of,
    with_callback,
)

BACKUP = "keras.src.callbacks.backup_and_restore"
PART = ".backup-"
"""Prefix of folders with incomplete files."""
COMPLETE = f"{PART}complete"
"""The folder with all files of one backup, before they take the places of those before: weights of one epoch and the
number of another would train an epoch twice."""
SEEDS = "seeds.json"
"""The file with the state of the random generators."""


def patch_backup(trainer: Any, module: Any, news: News) -> Iterator[Finding]:
    """Replaces `fit` and faulty methods of the callback."""
    callback = module.BackupAndRestore
    names = ("_save_model", "on_train_begin", "on_train_end")
    change = functools.partial(_change_callbacks, trainer, callback, news)
    if not all(hasattr(callback, name) for name in names) or not change_callbacks(trainer, change):
        yield unpatched("BackupAndRestore", fixed=False)
        return
    callback._save_model = _patched_save(trainer, callback._save_model)
    callback.on_train_begin = _patched_begin(trainer, callback.on_train_begin)
    callback.on_train_end = _patched_end(trainer, callback.on_train_end)
    yield patched("BackupAndRestore")


def _patched_save(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_multi_worker(trainer, self.model):
            original(self, *args, **kwargs)
            return
        if not _is_chief(self.model):
            return
        write_whole(original, self, *args, **kwargs)

    return _save_model


def write_whole(save: Callable[..., None], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a BackupAndRestore write its files into another folder, and renames the complete files."""
    folder = os.fspath(callback.backup_dir)
    if "://" in folder or callback.double_checkpoint:
        save(callback, *args, **kwargs)
        return
    os.makedirs(folder, exist_ok=True)
    finish_backup(folder)
    with tempfile.TemporaryDirectory(prefix=PART, dir=folder) as staging:
        whole = os.path.join(staging, "whole")
        os.mkdir(whole)
        with directed_to(callback, whole):
            save(callback, *args, **kwargs)
        seeds = [seed.numpy().tolist() for seed in _find_seeds(callback.model)]
        if seeds:
            with open(os.path.join(whole, SEEDS), "w") as stream:
                json.dump(seeds, stream)
        os.rename(whole, os.path.join(folder, COMPLETE))  # from here on, this is the backup
    finish_backup(folder)


def finish_backup(folder: str) -> None:
    """Moves the files of a complete backup to their places; also after a death during these moves."""
    complete = os.path.join(folder, COMPLETE)
    if os.path.isdir(complete):
        for name in os.listdir(complete):
            os.replace(os.path.join(complete, name), os.path.join(folder, name))
        os.rmdir(complete)


def read_seeds(callback: Any) -> None:
    """Restores the random generators of the callback's model, if the backup has their state."""
    seeds = _find_seeds(callback.model)
    with contextlib.suppress(OSError, ValueError):  # a backup of Keras alone, or in an object store
        with open(os.path.join(callback.backup_dir, SEEDS)) as stream:
            numbers = json.load(stream)
        for seed, value in zip(seeds, numbers) if len(seeds) == len(numbers) else ():  # noqa: B905 - Python 3.9
            seed.assign(value)


def _find_seeds(model: Any) -> list[Any]:
    """The variables with the state of the random generators of a model's layers."""
    return [variable for variable in model.variables if is_random_state(variable)]


def _patched_begin(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        is_alone = not _is_multi_worker(trainer, self.model)
        if is_alone or _is_chief(self.model) or not self.model.built:
            if not is_alone:
                finish_backup(os.fspath(self.backup_dir))
            original(self, logs)  # which raises, as on the chief, if the model is not built yet
            if not is_alone:
                read_seeds(self)

    return on_train_begin


def _patched_end(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if not _is_multi_worker(trainer, self.model) or _is_chief(self.model):
            original(self, logs)

    return on_train_end


def _change_callbacks(trainer: Any, callback: Any, news: News, model: Any, callbacks: Any) -> Any:
    """Adds a callback that shares the backup, if the chief has a BackupAndRestore."""
    if not _is_multi_worker(trainer, model):
        return callbacks
    backups = [each for each in flatten_callbacks(trainer, callbacks) if isinstance(each, callback)]
    (of_chief,) = add_up(trainer, model.distribute_strategy, [len(backups) if _is_chief(model) else 0])
    if of_chief:
        return _with_sharing(trainer, model, callbacks, backups)
    if backups:
        news.say("BackupAndRestore does nothing, because the chief's fit does not have it")
    return callbacks


def _with_sharing(trainer: Any, model: Any, callbacks: Any, backups: list[Any]) -> Any:
    """Adds a callback that shares the chief's backup, after those that read it."""
    base: Any = sys.modules[CALLBACK].Callback

    class ShareBackup(base):  # type: ignore[misc]  # a class of Keras
        def on_train_begin(self, logs: Any = None) -> None:
            _share(trainer, self.model, any(_has_backup(backup) for backup in backups))

    every = flatten_callbacks(trainer, callbacks)
    place = 1 + max((every.index(backup) for backup in backups), default=-1)
    return with_callback(trainer, model, callbacks, ShareBackup(), place)


def _share(trainer: Any, model: Any, has_backup: bool) -> None:
    """Gives all workers the epoch and the variables of the chief, if it has a backup."""
    strategy = model.distribute_strategy
    (exists,) = add_up(trainer, strategy, [int(has_backup and _is_chief(model))])
    if not exists:
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._initial_epoch = int(broadcast(trainer, strategy, int(getattr(model, "_initial_epoch", 0) or 0)))
    for variable in [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]:
        variable.assign(broadcast(trainer, strategy, variable.value))


@contextlib.contextmanager
def directed_to(callback: Any, folder: str) -> Iterator[None]:
    """Temporarily redirects the callback's paths to another folder."""
    before = os.fspath(callback.backup_dir)
    paths = {
        name: value
        for name, value in vars(callback).items()
        if isinstance(value, (str, os.PathLike)) and _is_below(os.fspath(value), before)
    }
    moved = {
        name: os.path.normpath(os.path.join(folder, os.path.relpath(value, before))) for name, value in paths.items()
    }
    vars(callback).update(moved)
    try:
        yield
    finally:
        vars(callback).update(paths)


def _is_below(path: Any, folder: str) -> bool:
    """Whether the path leads to the folder itself, or to something in it."""
    return not os.path.relpath(path, folder).startswith(os.pardir)


def _has_backup(callback: Any) -> bool:
    folder = os.fspath(callback.backup_dir)
    if "://" in folder:
        return True  # not checked: the epoch and the variables are broadcast in any case
    return os.path.isdir(folder) and any(not name.startswith(PART) for name in os.listdir(folder))


def _is_multi_worker(trainer: Any, model: Any) -> bool:
    return find_peers(trainer, model) is not None


def _is_chief(model: Any) -> bool:
    return number_of(model.distribute_strategy) == 0
