"""The processes that train a model together: TensorFlow's workers, or JAX's processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

from worker_entry.hooks.jax_time import TRAINER as JAX_TRAINER
from worker_entry.keras_patches import collectives
from worker_entry.keras_patches.on_jax import processes
from worker_entry.keras_patches.source import is_multi_worker, number_of
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Peers:
    """All processes that call `fit`, in the same way.

    `number`: this process's; the chief is 0. `add_up`: returns the sums of the processes' integers; all call it with as
    many. `writes_together`: the kinds of callbacks whose files all processes write in parts.
    """

    number: int
    add_up: Callable[[Sequence[int]], list[int]]
    writes_together: tuple[str, ...] = ()


def find_peers(trainer: Any, model: Any) -> Optional[Peers]:
    """The processes that train this model; None if it is this one alone. `trainer`: the module of Keras's trainer."""
    if trainer is sys.modules.get(JAX_TRAINER):
        if processes.find_distribution(trainer) is None:
            return None
        return Peers(processes.process_index(), processes.add_up, ("OrbaxCheckpoint",))
    strategy = model.distribute_strategy
    if strategy is None or not is_multi_worker(trainer, strategy):
        return None
    return Peers(number_of(strategy), functools.partial(collectives.add_up, trainer, strategy))
