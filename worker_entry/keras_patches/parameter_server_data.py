"""The data of Keras 3's `fit` and `evaluate` under ParameterServerStrategy, where every worker reads its own.

Keras asks its epoch iterator for `(first step, last step, what a step function is called with)`. For this strategy,
the last is an `Execution`: some steps, which any worker may do, with the data that the worker has itself.

- To train, each worker iterates over all of the data, again and again; whichever worker is free does the next steps.
- To evaluate, the data are divided into parts, each of which is evaluated once, by whichever worker is free: every
  batch counts once, even if a worker is lost meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

PARTS_PER_WORKER = 5
"""Of an evaluation. More share the work more evenly, but each reads the data from the beginning, and skips the rest."""


@dataclass(frozen=True)
class Execution:
    """What a worker is asked to do at once.

    Either `iterator` is what a worker trains on, or `dataset` is evaluated: every `parts`-th batch of its first `total`
    batches, from the batch `part` on. Both are per-worker values of the coordinator.
    """

    steps: int
    iterator: Any = None
    dataset: Any = None
    total: int = 0
    part: int = 0
    parts: int = 1


class WorkerData:
    """Stands in for Keras' epoch iterator.

    Args:
        tf: the module.
        get_adapter: Keras' `get_data_adapter`.
        workers: who does the steps, as `parameter_server_steps` has it.
        trains: whether the data are to train on.
        x: a `tf.data.Dataset`, a function of a `tf.distribute.InputContext` that returns one (which is called for each
            worker), what `create_per_worker_dataset` of a coordinator returns, or arrays.
        steps: of an epoch, or of an evaluation; may be None if the data say how many batches they have.
        steps_per_execution: how many steps of training a worker does at once.
        class_weight: by class.
        arrays: Keras' other arguments.
    """

    def __init__(
        self,
        tf: Any,
        get_adapter: Callable[..., Any],
        workers: Any,
        *,
        trains: bool,
        x: Any,
        steps: Optional[int],
        steps_per_execution: int,
        class_weight: Any = None,
        **arrays: Any,
    ) -> None:
        self._workers = workers
        self._trains = trains
        self._steps_per_execution = steps_per_execution
        self._end = tf.errors.OutOfRangeError
        self._out_of_data = False
        self._values: Any = None
        self._executions: Iterator[tuple[int, int, Execution]] = iter(())
        source, batches = _make_source(tf, get_adapter, workers.count, trains, x, steps, class_weight, arrays)
        if steps is None and batches is None:
            argument = "steps_per_epoch" if trains else "validation_steps, or the steps of evaluate,"
            raise ValueError(
                f"{argument} must be given under ParameterServerStrategy, because these data do not say how many "
                "batches they have"
            )
        if not trains and steps is not None and batches is not None and steps > batches:
            _warn_of_end()
            steps = batches
        self.num_batches = int(steps if steps is not None else batches or 0)
        self._dataset = source if _is_per_worker(source) else None
        self._source = source

    @property
    def element_spec(self) -> Any:
        """What a batch is."""
        return self._per_worker_dataset().element_spec

    def reset(self) -> None:
        """Begins anew, at the first step; called before training, and before each evaluation."""
        self._out_of_data = False

    def __iter__(self) -> WorkerData:
        self._executions = self._train() if self._trains else self._evaluate()
        return self

    def __next__(self) -> tuple[int, int, Execution]:
        return next(self._executions)

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Within it, steps are scheduled; all of them are done when it ends."""
        try:
            yield
            self._workers.join()
        except (StopIteration, self._end):
            with contextlib.suppress(self._end):  # of the other workers, too
                self._workers.coordinator.join()
            self._workers.join()
            self._out_of_data = True
            _warn_of_end()
        except BaseException:
            self._workers.forget()
            raise

    def _per_worker_dataset(self) -> Any:
        if self._dataset is None:
            self._dataset = self._workers.coordinator.create_per_worker_dataset(self._source)
            captured = getattr(getattr(self._dataset, "_dataset_fn", None), "captured_inputs", ())
            if any(tensor.dtype == "variant" for tensor in captured):
                raise ValueError(
                    "a function that returns a tf.data.Dataset must make it all itself: it uses one of the chief"
                )
        return self._dataset

    def _train(self) -> Iterator[tuple[int, int, Execution]]:
        if self._values is None or self._out_of_data:
            self._values = iter(self._per_worker_dataset())
        for first in range(0, self.num_batches, self._steps_per_execution):
            steps = min(self._steps_per_execution, self.num_batches - first)
            yield first, first + steps - 1, Execution(steps, iterator=self._values)

    def _evaluate(self) -> Iterator[tuple[int, int, Execution]]:
        if self._values is None:
            self._values = self._per_worker_dataset().build()
        parts = min(self.num_batches, self._workers.count * PARTS_PER_WORKER)
        first = 0
        for part in range(parts):
            steps = math.ceil((self.num_batches - part) / parts)
            execution = Execution(steps, dataset=self._values, total=self.num_batches, part=part, parts=parts)
            yield first, first + steps - 1, execution
            first += steps


def _make_source(
    tf: Any,
    get_adapter: Callable[..., Any],
    workers: int,
    trains: bool,
    x: Any,
    steps: Optional[int],
    class_weight: Any,
    arrays: dict[str, Any],
) -> tuple[Any, Optional[int]]:
    """What each worker's data are made from, and how many batches they have, if that is known."""
    options = {"class_weight": class_weight} if class_weight is not None else {}
    if _is_per_worker(x):
        if class_weight is not None:
            raise ValueError("class_weight cannot be given for data that a coordinator has distributed already")
        return x, None
    # What a strategy has made of a data set, or of a function, adds nothing where a worker is one replica.
    x = getattr(x, "_original_dataset", x) if _is_distributed(x) else x
    x = getattr(x, "_dataset_fn", x) if _is_distributed(x) else x
    if callable(x) and not isinstance(x, tf.data.Dataset):
        if arrays.get("y") is not None or arrays.get("sample_weight") is not None:
            raise ValueError("y and sample_weight cannot be given beside a function: its dataset has to contain them")

        def read() -> Any:
            data = x(tf.distribute.InputContext(1, 0, 1))
            return get_adapter(x=data, **options).get_tf_dataset() if options else data

        return read, None
    adapter = get_adapter(x=x, steps_per_epoch=steps, **options, **arrays)
    batches = adapter.num_batches
    dataset = adapter.get_tf_dataset()
    if not isinstance(dataset, tf.data.Dataset) or _needs_python(adapter):
        raise ValueError(
            "under ParameterServerStrategy the data must be a tf.data.Dataset, a function of a "
            f"tf.distribute.InputContext that returns one, or arrays; not {type(x).__name__}"
        )
    if not trains:
        return dataset, batches
    if workers > 1 and type(adapter).__name__ == "ArrayDataAdapter" and batches:

        def read_arrays() -> Any:
            # Each worker begins elsewhere: with a seed, they would all read in the same order.
            begin = tf.cast(tf.timestamp() * 1e6, tf.int64) % batches
            return adapter.get_tf_dataset().repeat().skip(begin)

        return read_arrays, batches
    return dataset.repeat(), batches


def _is_per_worker(x: Any) -> bool:
    """Whether it comes from `create_per_worker_dataset` of a coordinator."""
    return type(x).__name__.startswith("PerWorkerDataset")


def _is_distributed(x: Any) -> bool:
    """Whether it comes from `experimental_distribute_dataset` or `distribute_datasets_from_function` of a strategy."""
    return type(x).__name__.startswith("DistributedDataset")


def _needs_python(adapter: Any) -> bool:
    """Whether the batches are made by Python code, which is in this process only."""
    return type(adapter).__name__ not in ("ArrayDataAdapter", "TFDatasetAdapter")


def _warn_of_end() -> None:
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset can generate at least "
        "`steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your dataset.",
        stacklevel=2,
    )
