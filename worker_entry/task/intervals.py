"""Estimates the 99th percentile of the time from one batch to the next, without a measurement in each step."""

from __future__ import annotations

import math
from collections import Counter
from typing import Optional

_RATIO = 1.1
"""How much longer the intervals of a bin are than those of the one before."""
_SHORTEST_S = 1e-6


class Intervals:
    """The intervals between batches so far, counted in bins whose width grows with the length of an interval.

    How many batches were done in which time is noted twice a second. Which of them took longest is not known, so one of
    them counts as long as it can have been: all of the time in which the others would not have been done, at their
    usual speed. A long interval is thus too long by half a second at most.
    """

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def note(self, batches: int, seconds: float) -> None:
        """Notes that this many batches were done in this time; each began when the one before it was done."""
        if batches <= 0:
            return
        mean_s = seconds / batches
        usual_s = min(self._find(0.5), mean_s) if self._bins else mean_s
        self._bins[_bin(usual_s)] += batches - 1
        self._bins[_bin(seconds - (batches - 1) * usual_s)] += 1

    @property
    def p99_s(self) -> Optional[float]:
        """99 of 100 intervals are no longer than this; None before the first."""
        return self._find(0.99) if self._bins else None

    def _find(self, share: float) -> float:
        left = math.ceil(share * sum(self._bins.values()))
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                break
        return float(_RATIO**number)


def _bin(seconds: float) -> int:
    """The number n of the bin of this interval, which is no longer than _RATIO to the power n."""
    return math.ceil(math.log(max(seconds, _SHORTEST_S), _RATIO))
