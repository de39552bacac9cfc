"""Which workers keep the others waiting: those that need longer for their own part of a step."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from launcher.gang.events import TaskReported
from launcher.tasks import TaskId

SAMPLES = 5
"""How many of a task's last measurements count, each of a second or more."""
SLOW_RATIO = 1.5
SLOW_SHARE = 0.1
"""The share of a step's time by which a task has to be slower than the others to matter."""
REPEAT_S = 600.0
"""How long the same task is not reported again."""


class StragglerWatch:
    """Compares the tasks' times for a step, without the time for which they wait for each other."""

    def __init__(self) -> None:
        self._own: dict[TaskId, deque[float]] = {}
        self._reported: dict[TaskId, float] = {}

    def note(self, event: TaskReported, now: float) -> str | None:
        """A line if the event is news that a task is slow; `now`: monotonic seconds."""
        if event.progress is None or event.progress.own_s is None:
            return None
        samples = self._own.setdefault(event.task, deque(maxlen=SAMPLES))
        if samples and samples[-1] == event.progress.own_s:
            return None
        samples.append(event.progress.own_s)
        if len(samples) < SAMPLES or now - self._reported.get(event.task, -REPEAT_S) < REPEAT_S:
            return None
        own = {task: statistics.median(times) for task, times in self._own.items() if len(times) == SAMPLES}
        line = render_slow(event.task, own, event.progress.step_s or 0.0)
        if line is not None:
            self._reported[event.task] = now
        return line


def render_slow(task: TaskId, own: Mapping[TaskId, float], step_s: float) -> str | None:
    """`worker:2 takes 1.8 × the median step …`, if it does.

    Args:
        task: which task to look at.
        own: seconds that each task needs for its own part of a step.
        step_s: seconds that a step takes, waiting included.
    """
    others = [seconds for name, seconds in own.items() if name != task]
    if not others:
        return None
    usual = statistics.median(others)
    if own[task] < SLOW_RATIO * usual or own[task] - usual < SLOW_SHARE * step_s or usual <= 0:
        return None
    return (
        f"{task} takes {own[task] / usual:.1f} × the median step: {_duration(own[task])} of its own, "
        f"the others {_duration(usual)}, and then they wait for it"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
