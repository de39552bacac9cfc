"""Exchanges values between workers outside of a step. All workers have to call these functions, in the same order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

WIDTH = 20
"""The count of numbers that workers exchange at once."""


def add_up(trainer: Any, strategy: Any, numbers: Sequence[int]) -> list[int]:
    """Returns the sums of the workers' integers; each worker passes the same number of them, at most `WIDTH`."""
    padded = trainer.tf.constant([*numbers, *[0] * (WIDTH - len(numbers))], "int64")
    local = strategy.experimental_local_results(_summing(trainer, strategy, "int64")(padded))
    # Each replica of a worker has added the worker's numbers.
    return [int(number) // len(local) for number in local[0].numpy()[: len(numbers)]]


def broadcast(trainer: Any, strategy: Any, value: Any) -> Any:
    """Returns the chief's value: a number, or the content of a variable."""
    tf = trainer.tf
    own = tf.convert_to_tensor(strategy.experimental_local_results(value)[0])
    kept = ("float16", "float32", "float64", "int64")  # these can be added up on every device
    dtype = own.dtype.name if own.dtype.name in kept else "float32" if own.dtype.is_floating else "int64"
    flat = tf.reshape(tf.cast(own, dtype), [-1])
    of_first = strategy.experimental_local_results(_summing(trainer, strategy, dtype, of_first=True)(flat))[0]
    return tf.cast(tf.reshape(of_first, tf.shape(own)), own.dtype)


@functools.cache
def _summing(trainer: Any, strategy: Any, dtype: str, *, of_first: bool = False) -> Callable[[Any], Any]:
    """A function that adds up the vectors of all replicas, or only takes that of the first."""
    tf = trainer.tf

    def share(values: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if of_first:
            values = tf.where(tf.equal(context.replica_id_in_sync_group, 0), values, tf.zeros_like(values))
        return context.all_reduce("SUM", tf.identity(values))

    # Without tf.function, TensorFlow warns each time that it is slow.
    @tf.function(input_signature=[tf.TensorSpec([None], dtype)])  # type: ignore[untyped-decorator]
    def run(values: Any) -> Any:
        return strategy.run(share, args=(values,))

    return run  # type: ignore[no-any-return]
