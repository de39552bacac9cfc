"""Makes Keras 3 use each sample of a batch once if a program passes the batch itself, as to `train_on_batch`.

Keras divides the batches of a data set among all replicas, but gives a batch of `train_on_batch`, `test_on_batch` and
`predict_on_batch` to each replica as a whole. So `predict_on_batch` returns each row several times. With this patch,
the replicas of a process divide its batch. A batch of several workers consists of what each of them passes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from worker_entry.keras_patches.scope import move_into_scope
from worker_entry.keras_patches.source import is_multi_worker

_thread = threading.local()
"""`_thread.predicts`: whether `predict` runs; `_thread.own`: whether a worker keeps its predictions for itself."""


def keeps_predictions() -> bool:
    """Whether a predict function is traced for a batch that this worker alone has."""
    return bool(getattr(_thread, "own", False))


def patched_predict(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _thread.predicts = getattr(_thread, "predicts", False), True
        try:
            return original(self, *args, **kwargs)
        finally:
            _thread.predicts = before

    return predict


def patched_make_predict_function(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_predict_function(self: Any, force: bool = False) -> Any:
        if self.predict_function is not None and not force:
            return self.predict_function
        move_into_scope(trainer, self)  # before the function captures the variables
        returned = original(self, force)
        if self.distribute_strategy.num_replicas_in_sync > 1:
            of_all = self.predict_function
            original(self, True)
            self.predict_function = _PredictFunction(trainer, self.distribute_strategy, of_all, self.predict_function)
        return returned

    return make_predict_function


class _PredictFunction:
    """Replaces Keras's predict function.

    Args:
        trainer: the module of the trainer.
        strategy: the strategy of the model.
        of_all: Keras's function, for batches of which each replica of the cluster has a part.
        of_own: another one, for batches of this worker.
    """

    def __init__(self, trainer: Any, strategy: Any, of_all: Callable[..., Any], of_own: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._of_all = of_all
        self._of_own = of_own

    def __call__(self, data: Any) -> Any:
        if getattr(_thread, "predicts", False) or is_divided(self._trainer, data):
            return self._of_all(data)
        data = list(divide(self._trainer, self._strategy, data))
        if not is_multi_worker(self._trainer, self._strategy):
            return self._of_all(data)
        _thread.own = True  # while the function is traced
        try:
            return self._of_own(data)
        finally:
            _thread.own = False


def divide(trainer: Any, strategy: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Divides batches among the replicas of this process."""
    count = len(strategy.extended.worker_devices)
    for batch in batches:
        # TensorFlow cannot slice a sparse tensor by rows.
        is_dense = not any(isinstance(part, trainer.tf.SparseTensor) for part in trainer.tree.flatten(batch))
        if count == 1 or is_divided(trainer, batch) or not is_dense:
            yield batch
        else:
            yield trainer.tree.map_structure(functools.partial(_divide, trainer.tf, strategy, count), batch)


def is_divided(trainer: Any, batch: Any) -> bool:
    """Whether each replica has its own part of the batch."""
    distributed = trainer.tf.distribute.DistributedValues
    return any(isinstance(part, distributed) for part in trainer.tree.flatten(batch))


def _divide(tf: Any, strategy: Any, count: int, values: Any) -> Any:
    if values is None:
        return None
    tensor = values if isinstance(values, tf.RaggedTensor) else tf.convert_to_tensor(values)
    if tensor.shape.rank == 0:
        return tensor
    share = -(-int(tensor.shape[0]) // count)

    def part(context: Any) -> Any:
        number = context.replica_id_in_sync_group % count
        return tensor[number * share : (number + 1) * share]

    return strategy.experimental_distribute_values_from_function(part)
