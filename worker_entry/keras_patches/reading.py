"""Makes Keras 3 start to read its data only where it continues to read them.

Under a strategy, Keras builds a model from a batch: it reads the beginning of the data, and starts again to train. And
after each epoch, it makes an iterator that it does not use, which begins to prefetch under a strategy. Data that can be
read once, such as a generator, a queue or a stream, lose the batches that were read.

The specs of the tensors are enough to build a model; without a strategy, Keras uses only these when it traces the first
step. And an iterator need not read before it is used. But without a strategy, the unused iterator changes the order of
shuffled data. So that the order is the same, an iterator of the undivided data set is made, which reads nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from worker_entry.keras_patches.scope import move_into_scope
from worker_entry.keras_patches.source import find_trainer

MODEL = "keras.src.models.model"


class Unread:
    """An iterator of a distributed data set that begins to read when it is first used."""

    def __init__(self, dataset: Any, undivided: Any) -> None:
        self._dataset = dataset
        self._undivided = undivided
        self._iterator: Any = None

    def __iter__(self) -> Unread:
        iter(self._undivided)
        return self

    def __next__(self) -> Any:
        return next(self.begin())

    def begin(self) -> Any:
        """The iterator of TensorFlow."""
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator


def patched_get_iterator(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the epoch iterator's `_get_iterator`, which returns the data set to iterate over."""

    @functools.wraps(original)
    def _get_iterator(self: Any) -> Any:
        dataset = original(self)
        if self._distribute_strategy.num_replicas_in_sync == 1:
            return dataset
        return Unread(dataset, _undivided(trainer, self) if _has_ended(self) else ())

    return _get_iterator


def _has_ended(epoch_iterator: Any) -> bool:
    """Whether Keras makes the iterator that it does not use: the epoch is over, and each epoch has one of its own."""
    count = epoch_iterator._num_batches
    return (
        epoch_iterator.steps_per_epoch is None
        and epoch_iterator._current_iterator is not None
        and bool(count)
        and epoch_iterator._steps_seen >= count
    )


def _undivided(trainer: Any, epoch_iterator: Any) -> Any:
    """The program's own data set; nothing if it gave other data, or has divided the data set itself."""
    own = getattr(epoch_iterator.data_adapter, "_dataset", None)
    return own if isinstance(own, trainer.tf.data.Dataset) else ()


def patched_build(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    """Replaces `_maybe_symbolic_build`, which builds a model from an epoch iterator or a batch."""

    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        # If it returns, what is not built yet is built when the step is traced, as without a strategy.
        if strategy is None:
            return
        if self.train_function is None and self.test_function is None:  # not for each batch of train_on_batch
            move_into_scope(trainer, self)
        if _has_no_call(self):
            return
        if iterator is not None:
            data_batch = _of_replica(trainer, iterator._distributed_dataset.element_spec)
            if _has_unknown_rank(trainer, data_batch):
                return
        try:
            original(self, iterator=None, data_batch=data_batch)
        except Exception:
            if type(self).train_step is find_trainer(trainer).train_step:
                raise
            # A custom train_step may not call the model, or not with a batch.

    return _maybe_symbolic_build


def _has_no_call(model: Any) -> bool:
    """Whether the model cannot be called, such as a GAN with its own train_step."""
    base = getattr(sys.modules.get(MODEL), "Model", None)
    return base is not None and getattr(type(model), "call", None) is base.call


def _of_replica(trainer: Any, spec: Any) -> Any:
    """One replica's part of a batch: specs of tensors, and None for missing values."""

    def of_replica(part: Any) -> Any:
        values = getattr(part, "_value_specs", None)  # of a PerReplicaSpec
        one = part if values is None else values[0]
        return None if isinstance(one, trainer.tf.OptionalSpec) else one

    return trainer.tree.map_structure(of_replica, spec)


def _has_unknown_rank(trainer: Any, specs: Any) -> bool:
    return any(spec is not None and spec.shape.rank is None for spec in trainer.tree.flatten(specs))
