"""The data of Keras 3's `fit` and `evaluate` under ParameterServerStrategy, where every worker reads its own data.

Keras's epoch iterator yields `(first step, last step, argument of the step function)`; before Keras 3.11, without the
last step. For this strategy, the argument is an `Execution`: some steps that any worker may do, with data that the
worker reads itself.

- In training, each worker iterates over all data repeatedly; the next free worker does the next steps.
- In evaluation, the data are divided into parts, and the next free worker evaluates the next part: every batch counts
  once, even if a worker is lost.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

from worker_entry.protocol.frozen import dataclass

PARTS_PER_WORKER = 5
"""Parts of an evaluation. More parts divide the work more evenly, but each reads and skips the data of the others."""


@dataclass(frozen=True)
class Execution:
    """Steps that a worker does at once.

    The worker either trains on `iterator`, or evaluates `dataset`: every `parts`-th of the first `total` batches,
    beginning with batch `part`. Both fields are per-worker values of the coordinator.
    """

    steps: int
    iterator: Any = None
    dataset: Any = None
    total: int = 0
    part: int = 0
    parts: int = 1


class WorkerData:
    """Replaces Keras's epoch iterator.

    Args:
        tf: the TensorFlow module.
        get_adapter: Keras's `get_data_adapter`.
        workers: the `steps.Workers` that do the steps.
        trains: whether these are training data.
        with_last: whether this version of Keras expects the number of the last step.
        x: a `tf.data.Dataset`, a function of a `tf.distribute.InputContext` that returns one (called for each worker),
            the result of a coordinator's `create_per_worker_dataset`, or arrays.
        steps: the steps of an epoch or an evaluation; may be None if the data's number of batches is known.
        steps_per_execution: the number of training steps that a worker does at once.
        class_weight: the weights, by class.
        arrays: Keras's other arguments.
    """

    def __init__(
        self,
        tf: Any,
        get_adapter: Callable[..., Any],
        workers: Any,
        *,
        trains: bool,
        with_last: bool,
        x: Any,
        steps: Optional[int],
        steps_per_execution: int,
        class_weight: Any = None,
        **arrays: Any,
    ) -> None:
        self._workers = workers
        self._trains = trains
        self._with_last = with_last
        self._steps_per_execution = steps_per_execution
        self._end = tf.errors.OutOfRangeError
        self._out_of_data = False
        self._values: Any = None
        self._executions: Iterator[tuple[int, int, Execution]] = iter(())
        source, batches = _make_source(
            tf,
            get_adapter,
            workers=workers.count,
            trains=trains,
            x=x,
            steps=steps,
            class_weight=class_weight,
            arrays=arrays,
        )
        if steps is None and batches is None:
            argument = "steps_per_epoch" if trains else "validation_steps, or the steps of evaluate,"
            raise ValueError(
                f"{argument} must be given under ParameterServerStrategy, because the number of batches of these data "
                "is unknown"
            )
        if not trains and steps is not None and batches is not None and steps > batches:
            _warn_of_end()
            steps = batches
        self.num_batches = int(steps if steps is not None else batches or 0)
        self._dataset = source if _is_per_worker(source) else None
        self._source = source

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self._per_worker_dataset().element_spec

    def reset(self) -> None:
        """Clears the mark that the data ran out; called before training, and before each evaluation."""
        self._out_of_data = False

    def __iter__(self) -> WorkerData:
        self._executions = self._train() if self._trains else self._evaluate()
        return self

    def __next__(self) -> Union[tuple[int, int, Execution], tuple[int, Execution]]:
        first, last, execution = next(self._executions)
        return (first, last, execution) if self._with_last else (first, execution)

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Surrounds the scheduling of steps, and finally waits until all of them are done."""
        try:
            yield
            self._workers.join()
        except (StopIteration, self._end):
            with contextlib.suppress(self._end):  # other workers may be out of data, too
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
                    "a function that returns a tf.data.Dataset must create all of it: this one uses the chief's dataset"
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
    *,
    workers: int,
    trains: bool,
    x: Any,
    steps: Optional[int],
    class_weight: Any,
    arrays: dict[str, Any],
) -> tuple[Any, Optional[int]]:
    """The source of each worker's data, and the number of batches; None if unknown."""
    options = {"class_weight": class_weight} if class_weight is not None else {}
    if _is_per_worker(x):
        if class_weight is not None:
            raise ValueError("class_weight cannot be given for data that a coordinator has distributed")
        return x, None
    # A dataset that a strategy has distributed is unwrapped: with one replica per worker, distribution adds nothing.
    x = getattr(x, "_original_dataset", x) if _is_distributed(x) else x
    x = getattr(x, "_dataset_fn", x) if _is_distributed(x) else x
    if callable(x) and not isinstance(x, tf.data.Dataset):
        if arrays.get("y") is not None or arrays.get("sample_weight") is not None:
            raise ValueError("y and sample_weight cannot be given with a function: its dataset has to contain them")

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
            # Each worker begins at a different batch: with a seed, all of them would read in the same order.
            begin = tf.cast(tf.timestamp() * 1e6, tf.int64) % batches
            return adapter.get_tf_dataset().repeat().skip(begin)

        return read_arrays, batches
    return dataset.repeat(), batches


def _is_per_worker(x: Any) -> bool:
    """Whether `x` comes from a coordinator's `create_per_worker_dataset`."""
    return type(x).__name__.startswith("PerWorkerDataset")


def _is_distributed(x: Any) -> bool:
    """Whether `x` comes from a strategy's `experimental_distribute_dataset` or `distribute_datasets_from_function`."""
    return type(x).__name__.startswith("DistributedDataset")


def _needs_python(adapter: Any) -> bool:
    """Whether the batches are made by Python code, which runs only in this process."""
    return type(adapter).__name__ not in ("ArrayDataAdapter", "TFDatasetAdapter")


def _warn_of_end() -> None:
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset can generate at least "
        "`steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your dataset.",
        stacklevel=2,
    )
