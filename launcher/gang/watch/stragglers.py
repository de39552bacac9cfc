"""Which workers keep the others waiting: those that need longer for their own part of a step, and why.

A task's *score* is the median own time of the others, divided by its own: 1 is as fast as they are, 0.5 takes twice as
long. The task itself is not among the others: of two workers, the median of both would always be halfway between them,
and a score of 0.75 would need twice the time instead of a third more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Protocol

from launcher.gang.events import TaskReported
from launcher.tasks import TaskId
from launcher.wording import render_step_time
from worker_entry.protocol.frozen import dataclass, replace

WINDOW_S = 3.0
"""A window is at least this long; a task measures over a second or more."""
WINDOWS = 4
"""This many windows in a row show that a task is slow, or no longer slow: one slow second proves nothing."""
ENOUGH, MOST = 2, 20
"""The minimum number of measurements of each task in a window, and how many of the last ones count."""
SLOW_SCORE = 0.75
SLOW_SHARE = 0.1
"""The share of a step's time by which a task has to be slower than the others to matter."""
REPEAT_S = 600.0
"""The least time between two reports about the same task."""
EXPLAINED = 0.5
"""The share of the additional time that a reason has to explain."""
SWAP_SHARE = 0.1
"""By how much the share of a task's memory in swap has to exceed that of the others to explain its slowness."""


@dataclass(frozen=True)
class Standing:
    """One task against the others; `slow`: why it is slow, empty if it is not."""

    score: float
    slow: str = ""


@dataclass(frozen=True)
class News:
    """A task has become slow for this reason; without a reason, it is no longer slow."""

    task: TaskId
    message: str
    score: float
    reason: str = ""


class StragglerWatch:
    """Compares the tasks' times for a step, without the time for which they wait for each other.

    Only `standings` may be read from other threads.
    """

    def __init__(self) -> None:
        self._last: dict[TaskId, tuple[float | None, ...]] = {}
        """Each task's last measurement."""
        self._began = 0.0
        """When the current window began."""
        self._window: dict[TaskId, deque[Pace]] = {}
        """The measurements in the current window, of all tasks that were ever measured."""
        self._missing: set[TaskId] = set()
        """The tasks with too few measurements in the current window."""
        self._paces: deque[Mapping[TaskId, Pace]] = deque(maxlen=WINDOWS)
        """The last windows."""
        self._streaks: dict[TaskId, int] = {}
        """In how many windows in a row, up to the last, a task was slow or, as a negative number, was not."""
        self._reported: dict[TaskId, float] = {}
        self._announced: set[TaskId] = set()
        """The slow tasks that were reported as such."""
        self.standings: Mapping[TaskId, Standing] = {}
        """Every task that could be compared with others, in the last window."""

    def note(self, event: TaskReported, now: float, uses: Callable[[], Mapping[TaskId, Use]]) -> Sequence[News]:
        """Returns the news that follow from the event. `now`: monotonic seconds; `uses`: the tasks' resource usage."""
        progress, task = event.progress, event.task
        if progress is None or progress.own_s is None or progress.step_s is None:
            return ()
        measured = progress.step_s, progress.own_s, progress.data_s
        if self._last.get(task) == measured:
            return ()
        self._last[task] = measured
        self._began = self._began or now
        pace = Pace(step_s=progress.step_s, own_s=progress.own_s, data_s=progress.data_s)
        paces = self._window.setdefault(task, deque(maxlen=MOST))
        paces.append(pace)
        (self._missing.add if len(paces) < ENOUGH else self._missing.discard)(task)
        if self._missing or now - self._began < WINDOW_S:
            return ()
        return self._end_window(now, uses())

    def _end_window(self, now: float, uses: Mapping[TaskId, Use]) -> Sequence[News]:
        paces = {task: _with_use(median_pace(measured), uses.get(task)) for task, measured in self._window.items()}
        self._paces.append(paces)
        self._began = now
        self._missing = set(self._window)
        for measured in self._window.values():
            measured.clear()
        if len(paces) < 2:
            return ()
        usual = medians_of_others({task: pace.own_s for task, pace in paces.items()})
        judged = [self._judge(task, pace, usual[task], now) for task, pace in paces.items()]
        self.standings = {task: standing for task, (standing, _) in zip(paces, judged, strict=True)}
        return [news for _, news in judged if news is not None]

    def _judge(self, task: TaskId, pace: Pace, usual_s: float, now: float) -> tuple[Standing, News | None]:
        score = usual_s / pace.own_s if usual_s > 0 and pace.own_s > 0 else 1.0
        slow = score < SLOW_SCORE and pace.own_s - usual_s >= SLOW_SHARE * pace.step_s
        streak = self._streaks.get(task, 0)
        self._streaks[task] = streak = (max(streak, 0) + 1) if slow else (min(streak, 0) - 1)
        before = self.standings.get(task, Standing(1.0)).slow
        if before and streak <= -WINDOWS:
            return Standing(score), self._recover(task, score)
        if before or streak < WINDOWS:
            return Standing(score, before), None
        own, usual = self._compare(task)
        reason = find_reason(own, usual)
        news = News(task, render_slow(task, own, usual, reason), score, reason.what)
        return Standing(score, reason.what), self._announce(news, now)

    def _announce(self, news: News, now: float) -> News | None:
        task = news.task
        if now - self._reported.get(task, -REPEAT_S) < REPEAT_S:
            return None
        self._reported[task] = now
        self._announced.add(task)
        return news

    def _recover(self, task: TaskId, score: float) -> News | None:
        if task not in self._announced:
            return None
        self._announced.discard(task)
        return News(task, f"{task} is as fast as the others again", score)

    def _compare(self, task: TaskId) -> tuple[Pace, Pace]:
        """The task's medians over the last windows, and those of the others."""
        own = [paces[task] for paces in self._paces if task in paces]
        others = [pace for paces in self._paces for name, pace in paces.items() if name != task]
        return median_pace(own), median_pace(others)


def medians_of_others(values: Mapping[TaskId, float]) -> dict[TaskId, float]:
    """For each of two tasks or more, the median of the values of all others."""
    tasks = sorted(values, key=lambda task: values[task])
    inorder = [values[task] for task in tasks]
    medians = {}
    for place, task in enumerate(tasks):
        # The middle of all others, two places if their number is even, without a copy of the list for each task.
        middle = [(len(tasks) - 2) // 2, (len(tasks) - 1) // 2]
        medians[task] = statistics.fmean(inorder[at + (at >= place)] for at in middle)
    return medians


def render_slow(task: TaskId, slow: Pace, usual: Pace, reason: Reason) -> str:
    """`worker:2 takes 1.8 × the median step …`."""
    times = slow.own_s / usual.own_s if usual.own_s > 0 else math.inf
    return (
        f"{task} takes {times:.1f} × the median step: {render_step_time(slow.own_s)} of its own, "
        f"the others {render_step_time(usual.own_s)}, and then they wait for it; reason: {reason}"
    )


def _with_use(pace: Pace, use: Use | None) -> Pace:
    if use is None:
        return pace
    return replace(pace, cpu=use.cpu, starved=use.starved, memory=use.memory, swapped=use.swapped)


class Use(Protocol):
    """The resource usage of a task, as last measured; None for unknown values."""

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
    """Measurements of one task over some seconds; None for unknown values.

    `step_s`: seconds of a step; `own_s`: the same without waiting for the others; `data_s`: the part of the step during
    which the task waited for its input. The other fields are as in Use.
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
        """How many times longer the task's threads take because they wait for a core."""
        if self.cpu is None or self.starved is None or self.cpu <= 0:
            return None
        return (self.cpu + self.starved) / self.cpu


@dataclass(frozen=True)
class Reason:
    """What is slow, as a phrase, and the evidence, which may be empty."""

    what: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.evidence})" if self.evidence else self.what


def median_pace(paces: Sequence[Pace]) -> Pace:
    """The medians of the known values."""
    values = {field.name: _median(getattr(pace, field.name) for pace in paces) for field in fields(Pace)}
    return Pace(**values)  # type: ignore[arg-type]  # step_s and own_s are always known


def find_reason(slow: Pace, usual: Pace) -> Reason:
    """Finds the reason that explains half of the additional time that a task needs.

    Causes are tried before their effects: a task without a core, because other programs use the core or a quota is used
    up, also gets its input late. If nothing else explains the time, the reason is the task's own computation.

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
    """Whether the task would be faster by `excess` seconds if its threads had cores as often as those of the others."""
    if slow.stretch is None or usual.stretch is None or slow.starved is None or usual.starved is None:
        return False
    # Threads that wait while other threads of the task run may cost no time: both measures have to explain the time.
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
