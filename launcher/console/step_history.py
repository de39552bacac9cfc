"""The training speed of each task during the last minute, from successive statuses. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

MINUTE_S = 60.0
BARS = "▁▂▃▄▅▆▇█"
TAIL_S = 3.0
"""For this time after its last step, a task does not count as slower, because its next step may be unknown."""


class StepHistory:
    """The step numbers of one task, each with the time at which it was first seen."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._steps: list[int] = []

    def note(self, time: float, step: int | None) -> None:
        """Records the number of the last step; `time`: Unix seconds."""
        if step is None or (self._steps and step < self._steps[-1]):  # the task was restarted
            self._times, self._steps = [], []
        if step is not None and (not self._steps or step > self._steps[-1]):
            self._times.append(time)
            self._steps.append(step)
        while len(self._times) > 2 and self._times[1] < time - MINUTE_S:
            del self._times[0], self._steps[0]

    def rates(self, now: float, count: int) -> list[float]:
        """Steps per second in equal parts of the last minute, oldest first; only parts with known steps."""
        if len(self._times) < 2:
            return []
        last, usual_s = self._times[-1], (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        end = last if now - last < max(TAIL_S, 2 * usual_s) else now
        size = MINUTE_S / count
        edges = [end - size * number for number in range(count, -1, -1)]
        first = self._times[0]
        return [
            (self._step_at(late) - self._step_at(max(early, first))) / (late - max(early, first))
            for early, late in pairwise(edges)
            if late - first > size / 2
        ]

    def _step_at(self, time: float) -> float:
        """Between two changes, the steps are spread evenly."""
        after = bisect_right(self._times, time)
        if after == len(self._times):
            return float(self._steps[-1])
        early, late = self._times[after - 1], self._times[after]
        done = self._steps[after] - self._steps[after - 1]
        return self._steps[after - 1] + done * (time - early) / (late - early)


def render_spark(rates: Sequence[float], count: int) -> str:
    """A chart such as `▁▂▅█` of `count` characters; the highest is the fastest, and a blank stands for no step."""
    top = max(rates, default=0.0)
    bars = "".join(" " if rate <= 0 else BARS[min(int(rate / top * 8), 7)] for rate in rates)
    return bars.rjust(count)
