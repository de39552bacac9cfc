"""Makes Keras 3's `BackupAndRestore` correct with several workers: the chief's backup counts, and all workers get it.

In Keras, workers that share a path all write the same files at once, and each worker reads the files that it finds.
Workers that do not share a path, or were killed between each other's backups, resume from different epochs. A worker
that is killed while it writes leaves an unreadable file.

With this patch, only the chief writes, and it renames complete files. Before training, the chief reads the backup, and
sends its epoch and all variables to the other workers over the network. So workers may share the path, or use separate
paths or disks; only the chief's backup must exist when the cluster is started again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.source import is_multi_worker

BACKUP = "keras.src.callbacks.backup_and_restore"
PART = ".backup-"
"""Prefix of folders with incomplete files."""


def patch_backup(trainer: Any, module: Any) -> list[str]:
    """Replaces faulty methods of the callback; returns its name."""
    callback = module.BackupAndRestore
    if not all(hasattr(callback, name) for name in ("_save_model", "on_train_begin", "on_train_end")):
        return []
    callback._save_model = _patched_save(trainer, callback._save_model)
    callback.on_train_begin = _patched_begin(trainer, callback.on_train_begin)
    callback.on_train_end = _patched_end(trainer, callback.on_train_end)
    return ["BackupAndRestore"]


def _patched_save(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        folder = str(self.backup_dir)
        chief = _is_chief(self)
        if not _is_multi_worker(trainer, self) or (chief and ("://" in folder or self.double_checkpoint)):
            original(self, *args, **kwargs)
            return
        if chief:
            os.makedirs(folder, exist_ok=True)
        # The other workers write only to a temporary folder: they take part because reading a variable may need them.
        with tempfile.TemporaryDirectory(prefix=PART, dir=folder if chief else None) as staging:
            with _directed_to(self, staging):
                original(self, *args, **kwargs)
            if chief:
                # The epoch comes last: weights that are newer than the epoch are just trained a little longer.
                for name in sorted(os.listdir(staging), key=lambda name: (name.endswith(".json"), name)):
                    os.replace(os.path.join(staging, name), os.path.join(folder, name))

    return _save_model


def _patched_begin(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not _is_multi_worker(trainer, self):
            original(self, logs)
            return
        model = self.model
        broadcast = functools.partial(_broadcast, trainer, model.distribute_strategy)
        with tempfile.TemporaryDirectory() as empty:
            with contextlib.nullcontext() if _is_chief(self) else _directed_to(self, empty):
                original(self, logs)  # on every worker, because it raises if the model is not built yet
        if not int(broadcast(int(_has_backup(self)))):
            return
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model._initial_epoch = int(broadcast(int(getattr(model, "_initial_epoch", 0) or 0)))
        for variable in [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]:
            variable.assign(broadcast(variable.value))

    return on_train_begin


def _patched_end(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if not _is_multi_worker(trainer, self) or _is_chief(self):
            original(self, logs)

    return on_train_end


def _broadcast(trainer: Any, strategy: Any, value: Any) -> Any:
    """Returns the chief's value; all workers call this function, with a number or a variable's value."""
    tf = trainer.tf
    own = tf.convert_to_tensor(strategy.experimental_local_results(value)[0])
    # Types that can be reduced on every device.
    wide = tf.cast(own, tf.float64 if own.dtype.is_floating else tf.int64)

    def share() -> Any:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        return context.all_reduce("SUM", tf.where(is_first, wide, tf.zeros_like(wide)))

    return tf.cast(strategy.experimental_local_results(strategy.run(share))[0], own.dtype)


@contextlib.contextmanager
def _directed_to(callback: Any, folder: str) -> Iterator[None]:
    """Temporarily redirects the callback's paths to another folder."""
    before = str(callback.backup_dir)
    paths = {
        name: value
        for name, value in vars(callback).items()
        if isinstance(value, (str, os.PathLike)) and before in str(value)
    }
    vars(callback).update({name: str(value).replace(before, folder, 1) for name, value in paths.items()})
    try:
        yield
    finally:
        vars(callback).update(paths)


def _has_backup(callback: Any) -> bool:
    folder = str(callback.backup_dir)
    if "://" in folder:
        return True  # not checked: the epoch and the variables are broadcast in any case
    return os.path.isdir(folder) and any(not name.startswith(PART) for name in os.listdir(folder))


def _is_multi_worker(trainer: Any, callback: Any) -> bool:
    strategy = callback.model.distribute_strategy
    return strategy is not None and is_multi_worker(trainer, strategy)


def _is_chief(callback: Any) -> bool:
    resolver = getattr(callback.model.distribute_strategy, "cluster_resolver", None)
    if resolver is None:
        return True
    if resolver.task_type == "worker":
        return bool(resolver.task_id == 0 and "chief" not in resolver.cluster_spec().jobs)
    return bool(resolver.task_type in (None, "", "chief"))
