"""Why a worker is slower than the others, from what was measured of all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Protocol

from launcher.wording import render_step_time
from worker_entry.protocol.frozen import dataclass

EXPLAINED = 0.5
"""The share of the additional time that a reason has to explain."""
SWAP_SHARE = 0.1
"""By how much the share of a task's memory in swap has to exceed that of the others to explain its slowness."""


class Use(Protocol):
    """What a task uses, as last measured; None for what is not known."""

    @property
    def cpu(self) -> float | None:
        """Cores."""

    @property
    def starved(self) -> float | None:
        """Threads that could have run and had no core, on average."""

    @property
    def memory(self) -> int:
        """Bytes of resident memory."""

    @property
    def swapped(self) -> int:
        """Bytes in swap."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured of one task over some seconds; None for what is not known.

    `step_s`: seconds of a step; `own_s`: without the time for which it waited for the others; `data_s`: the part during
    which it waited for its input. The other fields are as in Use.
    """

    step_s: float
    own_s: float
    data_s: float | None = None
    cpu: float | None = None
    starved: float | None = None
    memory: float | None = None
    swapped: float | None = None

    @property
    def stretch(self) -> float | None:
        """How many times longer its threads take because they wait for a core."""
        if self.cpu is None or self.starved is None or self.cpu <= 0:
            return None
        return (self.cpu + self.starved) / self.cpu


@dataclass(frozen=True)
class Reason:
    """What is slow, as a phrase, and what shows it; `evidence` may be empty."""

    what: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.evidence})" if self.evidence else self.what


def median_pace(paces: Sequence[Pace]) -> Pace:
    """The medians of all that is known."""
    values = {field.name: _median(getattr(pace, field.name) for pace in paces) for field in fields(Pace)}
    return Pace(**values)  # type: ignore[arg-type]  # step_s and own_s are always known


def find_reason(slow: Pace, usual: Pace) -> Reason:
    """What explains half of the additional time that a task needs.

    A cause comes before its effect: a task without a core, whether other programs use it or a quota is used up, gets
    its input late, too. What nothing else explains is the task's own computation.

    Args:
        slow: the task.
        usual: the medians of the others.
    """
    excess = slow.own_s - usual.own_s
    if _is_starved(slow, usual, EXPLAINED * excess):
        return Reason("CPU starved", f"it uses {slow.cpu:.2g} cores, and {slow.starved:.2g} threads wait for one")
    if slow.data_s is not None and slow.data_s - (usual.data_s or 0.0) >= EXPLAINED * excess:
        others = f", the others {render_step_time(usual.data_s)}" if usual.data_s is not None else ""
        return Reason("input pipeline", f"it waits {render_step_time(slow.data_s)} for its input{others}")
    if _share_in_swap(slow) - _share_in_swap(usual) >= SWAP_SHARE:
        return Reason("swapping", f"{_share_in_swap(slow):.0%} of its memory is in swap")
    return Reason("own computation")


def _is_starved(slow: Pace, usual: Pace, excess: float) -> bool:
    """Whether it would be faster by `excess` seconds if its threads had cores as often as those of the others."""
    if slow.stretch is None or usual.stretch is None or slow.starved is None or usual.starved is None:
        return False
    # Threads that wait while others of the task run may cost it nothing: both measures have to explain the time.
    by_stretch = slow.own_s * (1 - usual.stretch / slow.stretch)
    by_threads = (slow.starved - usual.starved) * slow.step_s
    return min(by_stretch, by_threads) >= excess


def _share_in_swap(pace: Pace) -> float:
    if not pace.swapped:
        return 0.0
    return pace.swapped / (pace.swapped + (pace.memory or 0.0))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
