"""Exchanges values between JAX's processes outside of a step. All have to call these functions, in the same order."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any


def find_distribution(trainer: Any) -> Any:
    """The distribution of several processes by which this process trains; None if it trains alone.

    `trainer`: the module of the backend's trainer.
    """
    distribution = trainer.distribution_lib.distribution()
    return distribution if getattr(distribution, "_is_multi_process", False) else None


@contextlib.contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Lets this process make variables without the others.

    Keras makes some while it saves. Under a distribution, JAX compares each variable with those of the other processes,
    which may not save.
    """
    distribution = find_distribution(trainer)
    if distribution is not None:
        trainer.distribution_lib.set_distribution(None)
    try:
        yield
    finally:
        if distribution is not None:
            trainer.distribution_lib.set_distribution(distribution)


def process_index() -> int:
    return int(_jax("jax").process_index())


def add_up(numbers: Sequence[int]) -> list[int]:
    """Returns the sums of the processes' integers; each passes the same number of them."""
    numpy = _jax("numpy")
    own = numpy.array([numbers], "int64").view("uint8")  # JAX has no integers of 64 bits unless they are turned on
    return [int(total) for total in numpy.ascontiguousarray(gather(own)).view("int64").sum(axis=0)]


def broadcast(data: bytes) -> bytes:
    """Returns the first process's bytes; the other processes pass any as long."""
    numpy = _jax("numpy")
    own = numpy.frombuffer(data, "uint8")
    return bytes(_jax("jax.experimental.multihost_utils").broadcast_one_to_all(own).tobytes())


def gather(value: Any) -> Any:
    """The rows that the processes have of an array: an array of NumPy, the same on all processes."""
    return _jax("numpy").asarray(_jax("jax.experimental.multihost_utils").process_allgather(value, tiled=True))


def _jax(name: str) -> Any:
    """A module, once the program trains: it has imported JAX by then."""
    return importlib.import_module(name)
