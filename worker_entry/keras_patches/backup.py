"""Makes Keras 3's `BackupAndRestore` right with several workers: the chief's backup counts, and all get it.

Keras has all workers write the same files at once, if they share a path, and each read what it finds. Workers that do
not share one, or were killed between each other's backups, go on from different epochs; and a worker that is killed
while it writes leaves half a file, which nobody can read.

Here the chief alone writes, by renaming what is whole. Before training it reads, and tells the others its epoch and all
variables, over the network. So the path may be shared, be each worker's own, or lie on disks that are apart; only the
chief's has to be there still when the cluster is started again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

BACKUP = "keras.src.callbacks.backup_and_restore"
PART = ".backup-"
"""How folders begin that hold what is not whole yet."""


def patch_backup(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in the callback; returns the names of what it replaced."""
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
        # The others only take part: to read a variable may need all workers.
        with tempfile.TemporaryDirectory(prefix=PART, dir=folder if chief else None) as whole:
            with _directed_to(self, whole):
                original(self, *args, **kwargs)
            if chief:
                # The epoch last: weights that are newer than it says are trained a little longer, and no less.
                for name in sorted(os.listdir(whole), key=lambda name: (name.endswith(".json"), name)):
                    os.replace(os.path.join(whole, name), os.path.join(folder, name))

    return _save_model


def _patched_begin(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not _is_multi_worker(trainer, self):
            original(self, logs)
            return
        model = self.model
        tell = functools.partial(_tell, trainer, model.distribute_strategy)
        with tempfile.TemporaryDirectory() as nothing:
            with contextlib.nullcontext() if _is_chief(self) else _directed_to(self, nothing):
                original(self, logs)  # which refuses a model that is not built yet, on every worker
        if not int(tell(int(_has_backup(self)))):
            return
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model._initial_epoch = int(tell(int(getattr(model, "_initial_epoch", 0) or 0)))
        for variable in [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]:
            variable.assign(tell(variable.value))

    return on_train_begin


def _patched_end(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if not _is_multi_worker(trainer, self) or _is_chief(self):
            original(self, logs)

    return on_train_end


def _tell(trainer: Any, strategy: Any, value: Any) -> Any:
    """Called by all workers with a number, or a variable's value; returns the chief's."""
    tf = trainer.tf
    own = tf.convert_to_tensor(strategy.experimental_local_results(value)[0])
    # What can be reduced on every device.
    wide = tf.cast(own, tf.float64 if own.dtype.is_floating else tf.int64)

    def share() -> Any:
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        return context.all_reduce("SUM", tf.where(is_first, wide, tf.zeros_like(wide)))

    return tf.cast(strategy.experimental_local_results(strategy.run(share))[0], own.dtype)


@contextlib.contextmanager
def _directed_to(callback: Any, folder: str) -> Iterator[None]:
    """Within it, the callback's paths are below another folder."""
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
        return True  # then the epoch and the variables are told, whatever they are
    return os.path.isdir(folder) and any(not name.startswith(PART) for name in os.listdir(folder))


def _is_multi_worker(trainer: Any, callback: Any) -> bool:
    strategy = callback.model.distribute_strategy
    return strategy is not None and bool(trainer._collective_all_reduce_multi_worker(strategy))


def _is_chief(callback: Any) -> bool:
    resolver = getattr(callback.model.distribute_strategy, "cluster_resolver", None)
    if resolver is None:
        return True
    if resolver.task_type == "worker":
        return bool(resolver.task_id == 0 and "chief" not in resolver.cluster_spec().jobs)
    return bool(resolver.task_type in (None, "", "chief"))
