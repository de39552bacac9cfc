"""Counts a run's goodput from its journal, record by record, and from the progress that its tasks report.

A *cycle* is the time from one start of the tasks to the next. The kind of its seconds is often known only later:
whether a restart follows a failure, whether the failure was a stall. So a cycle keeps its times until the next cycle
begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from launcher.gang.events import TaskExited, TaskListening, TaskReported, TaskStarted
from launcher.report.goodput import KINDS, Goodput, make_goodput
from launcher.report.run_events import AttemptEnded, Ended, Record, RunStarted, State
from launcher.report.samples import ProgressSample
from launcher.report.state_names import StateName
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Progress

IDLE = {"stalled": "stalled_s", "node-lost": "waiting_s", "node-unreachable": "waiting_s"}
"""The kind of the time since the last step, by the verdict that explains it."""
Afterwards = Literal["unknown", "connecting_s", "restarting_s", "waiting_s"]
LIMIT = 4096
"""The most points; beyond that, every second point is removed. Times between two points are interpolated."""


@dataclasses.dataclass
class _Cycle:
    """One cycle. Times are Unix seconds; None for an event that has not happened."""

    start: float
    formed: float | None = None
    """When the tasks were started."""
    attempt: int = 0
    opened: float | None = None
    """When the last of the tasks opened its port."""
    up: float | None = None
    guide: TaskId | None = None
    """The task whose steps are counted: the first task that reported a step."""
    began: float = 0.0
    """When the guide had done its first step."""
    resumed: int | None = None
    line_s: float = 0.0
    """Seconds of training that counts, from earlier cycles."""
    announced: bool = False
    """Whether a task has reported training: then the program reports steps."""
    last: float = 0.0
    """When the last step was done."""
    trainers: set[TaskId] = dataclasses.field(default_factory=set)
    finished: dict[TaskId, float] = dataclasses.field(default_factory=dict)
    failed: float | None = None
    stopped: float | None = None
    idle: str = ""
    """The kind of the time between the last step and the end of training; empty if that time was training."""
    idle_since: float | None = None
    """When that time began, for a program that reports no steps."""
    afterwards: list[tuple[float, Afterwards]] = dataclasses.field(default_factory=list)
    """The kinds of time since the end of training, each with its beginning."""
    gap: tuple[float, float] | None = None
    """The beginning and end of the time without a controller, unless a later step shows that the tasks survived it."""
    orphaned: bool = False
    """Whether the controller is gone, and no later controller has taken over the tasks."""

    def spend(self, until: float, *, has_stepped: bool) -> dict[str, float]:
        """Returns the seconds of the cycle up to `until`, by kind.

        Args:
            until: when the cycle ends, or now.
            has_stepped: whether the program is known to report steps.
        """
        spent = dict.fromkeys(KINDS, 0.0)
        until = max(until, self.start)
        end = self._find_end(until)
        formed = self._within(self.formed if self.formed is not None else end, self.start, end)
        began: float | None = self.began if self.guide is not None else None
        if began is None and not self.announced and not has_stepped:
            began = self.up
        began = self._within(began if began is not None else end, formed, end)
        idle = end
        if self.idle and began < end:
            idle = self._within(self.last if self.guide is not None else self.idle_since, began, end)
        spent["connecting_s"] += formed - self.start
        spent["forming_s"] += began - formed
        spent["training_s"] += idle - began
        if self.idle:
            spent[self.idle] += end - idle
        self._spend_afterwards(spent, end, until)
        return spent

    def _find_end(self, until: float) -> float:
        """The end of training by a failure, the end of the program or a stop; `until` if training has not ended."""
        moments = [until if self.stopped is None else self.stopped]
        if self.failed is not None:
            moments.append(self.failed)
        if self.trainers and self.trainers <= self.finished.keys():
            moments.append(max(self.finished.values()))
        return self._within(min(moments), self.start, until)

    def _spend_afterwards(self, spent: dict[str, float], end: float, until: float) -> None:
        again = False
        for since, kind in reversed([(end, "unknown"), *self.afterwards]):
            since = self._within(since, end, until)
            again = again or kind != "unknown"
            spent[kind if kind != "unknown" else "restarting_s" if again else "ending_s"] += until - since
            until = since

    @staticmethod
    def _within(time: float | None, first: float, last: float) -> float:
        return last if time is None else min(max(time, first), last)


class GoodputCount:
    """The goodput of one run so far.

    Args:
        started: when the run began, in Unix seconds.
        decides: the types of tasks whose steps and ends count.
    """

    def __init__(self, started: float, decides: Collection[str]) -> None:
        self._started = started
        self._decides = decides
        self._spent = dict.fromkeys(KINDS, 0.0)
        """The seconds of all finished cycles, without training."""
        self._line = TrainingLine()
        self._unseen_s = 0.0
        """Training of finished cycles without steps, as long as no step was ever reported."""
        self._has_stepped = False
        self._latest = started
        self._cycle = _Cycle(started)

    @property
    def guide(self) -> tuple[int, TaskId] | None:
        """The current attempt and the task whose progress counts; None before the attempt's first step."""
        cycle = self._cycle
        return (cycle.attempt, cycle.guide) if cycle.guide is not None else None

    def note(self, record: Record) -> None:
        """Counts the next record of the journal."""
        event, cycle = record.event, self._cycle
        if cycle.orphaned and record.attempt == cycle.attempt:  # a controller took over its tasks
            cycle.orphaned, cycle.stopped, cycle.afterwards = False, None, []
        match event:
            case RunStarted() if event.generation:
                self._note_successor(record.time)
            case State(state):
                self._note_state(state, record)
            case TaskStarted(task) if task.type in self._decides:
                cycle.trainers.add(task)
                cycle.finished.pop(task, None)
            case TaskListening(_, opened) if cycle.up is None:
                cycle.opened = max(opened, cycle.opened or opened)
            case TaskExited(task) if task in cycle.trainers:
                cycle.finished[task] = event.finished if event.finished is not None else event.time
                if event.failed:
                    crash = event.crash
                    moment = crash.time if crash is not None and crash.thread is None else event.time
                    cycle.failed = moment if cycle.failed is None else min(cycle.failed, moment)
            case TaskReported(task, progress=Progress() as progress):
                self.note_progress(task, progress)
            case AttemptEnded(report) if report.attempt == cycle.attempt:
                reference = report.verdict.reference
                cycle.idle = IDLE.get(reference, "")
                # A program that reports no steps may train without output.
                cycle.idle_since = report.last_progress if reference == "stalled" else None
                if cycle.gap is not None and cycle.idle == "waiting_s":  # no task survived until the takeover
                    cycle.idle = ""
                    self._end_at(cycle.gap[0])
            case Ended():
                self._stop(record.time)
        self._latest = max(self._latest, record.time)

    def note_progress(self, task: TaskId, progress: Progress) -> None:
        """Counts the progress of a task of the current attempt."""
        cycle = self._cycle
        if task.type not in self._decides or cycle.formed is None or cycle.stopped is not None:
            return
        cycle.announced = True
        if progress.first_step is None:
            return
        if cycle.guide is None:
            self._begin_training(task, progress)
        self._note_step(task, progress.time, progress.step, progress.epoch)

    def note_sample(self, task: TaskId, sample: ProgressSample) -> None:
        """Counts a sample from a task's file of samples; ignores all tasks but the guide."""
        if task == self._cycle.guide:
            self._note_step(task, sample.time, sample.step, sample.epoch)

    def count(self, now: float) -> Goodput:
        """The goodput up to `now`, in Unix seconds; for a finished run, `now` is its end."""
        spent = self._cycle.spend(now, has_stepped=self._has_stepped)
        seconds = {kind: spent[kind] + self._spent[kind] for kind in KINDS}
        seconds["training_s"] += self._unseen_s + self._trained_before
        return make_goodput(seconds)

    @property
    def _trained_before(self) -> float:
        return self._cycle.line_s if self._cycle.guide is not None else self._line.trained_s

    def _note_state(self, state: StateName, record: Record) -> None:
        cycle, time = self._cycle, record.time
        match state:
            case "forming" if cycle.formed is None and cycle.stopped is None:
                cycle.formed, cycle.attempt = time, record.attempt
            case "forming":
                self._close(time)
                self._cycle = _Cycle(time, formed=time, attempt=record.attempt)
            case "running" if cycle.up is None:  # reported a moment after the cluster was up
                cycle.up = cycle.opened if cycle.opened is not None else time
            case "stopping" | "succeeded" | "failed" | "interrupted":
                self._stop(time)
            case "waiting":
                self._stop(time, "waiting_s")
            case "restarting" | "connecting" if state == "restarting" or cycle.stopped is not None:
                is_again = state == "restarting" or cycle.formed is not None
                self._stop(time, "restarting_s" if is_again else "connecting_s")  # it has waited for GPUs until now

    def _note_successor(self, time: float) -> None:
        """Notes that a later controller starts at this time."""
        cycle = self._cycle
        gone = max(self._latest, cycle.last)
        if cycle.stopped is None and cycle.formed is not None:
            cycle.gap, cycle.orphaned = (gone, time), True
        self._end_at(gone)

    def _end_at(self, gone: float) -> None:
        """Notes that the tasks ended with their controller, at `gone`."""
        cycle = self._cycle
        cycle.stopped = gone if cycle.stopped is None else min(cycle.stopped, gone)
        cycle.afterwards.append((gone, "restarting_s"))

    def _stop(self, time: float, kind: Afterwards = "unknown") -> None:
        cycle = self._cycle
        if cycle.stopped is None:
            cycle.stopped = time
        if (cycle.afterwards[-1][1] if cycle.afterwards else "unknown") != kind:
            cycle.afterwards.append((time, kind))

    def _begin_training(self, task: TaskId, progress: Progress) -> None:
        cycle, first_step, epoch = self._cycle, progress.first_step or 0, progress.first_epoch or 0
        if not self._has_stepped:  # so the time counted as training preceded the first step
            self._has_stepped = True
            self._spent["forming_s"] += self._unseen_s
            self._unseen_s = 0.0
        # An optimizer that was not restored does not show whether weights were.
        cycle.resumed = progress.resumed if progress.resumed or epoch <= 1 else None
        cycle.guide, cycle.began = task, progress.began
        # With `model.fit`, the step counts from the beginning of the attempt.
        before = 0 if progress.resumed is not None else first_step - 1
        self._spent["lost_s"] += self._line.go_on_from(TrainingPosition(before, epoch, cycle.resumed))
        cycle.line_s = self._line.trained_s
        self._note_step(task, progress.began, first_step, epoch)

    def _note_step(self, task: TaskId, time: float, step: int, epoch: int | None) -> None:
        cycle = self._cycle
        cycle.last = max(cycle.last, time)
        if cycle.gap is not None and time > cycle.gap[1]:
            cycle.gap = None
        if task == cycle.guide:
            total = cycle.resumed + step if cycle.resumed is not None else None
            self._line.add(cycle.line_s + max(time - cycle.began, 0.0), TrainingPosition(step, epoch or 0, total))

    def _close(self, until: float) -> None:
        """Adds the current cycle to the sums of the finished cycles."""
        spent = self._cycle.spend(until, has_stepped=self._has_stepped)
        training_s = spent.pop("training_s")
        for kind, seconds in spent.items():
            self._spent[kind] += seconds
        if self._cycle.guide is not None:
            self._line.end(self._cycle.line_s + training_s)
        else:
            self._unseen_s += training_s


@dataclass(frozen=True)
class TrainingPosition:
    """A position in the training: `total` steps since the first start of the training, if known.

    `epoch` (0 if the program reports none) and `step` are the program's own numbers; either may start again.
    """

    step: int
    epoch: int = 0
    total: int | None = None


class TrainingLine:
    """The training that counts, as a line over all attempts: the seconds that it took to reach each position.

    An attempt that resumes from a checkpoint continues at an earlier position of the line. The training after that
    position is lost.
    """

    def __init__(self) -> None:
        self.trained_s = 0.0
        """Seconds of all training that counts, up to the end of the last finished attempt."""
        self._points: list[tuple[float, TrainingPosition]] = []

    def go_on_from(self, place: TrainingPosition) -> float:
        """Notes that an attempt begins at this place; returns the seconds of training that are lost."""
        begins_s = self._find(place)
        lost_s, self.trained_s = self.trained_s - begins_s, begins_s
        self._points = [point for point in self._points if point[0] <= begins_s and not _is_after(point[1], place)]
        self._points.append((begins_s, place))
        return lost_s

    def add(self, seconds: float, place: TrainingPosition) -> None:
        """Notes that the attempt has reached this place; ignores calls out of order."""
        if self._points and (seconds < self._points[-1][0] or (seconds, place) == self._points[-1]):
            return
        self._points.append((seconds, place))
        if len(self._points) > LIMIT:
            del self._points[1:-1:2]

    def end(self, seconds: float) -> None:
        """Notes that the attempt is over, `seconds` of training after the line's beginning."""
        self.trained_s = seconds
        self._points = [(min(at, seconds), place) for at, place in self._points]

    def _find(self, place: TrainingPosition) -> float:
        """The seconds of training that it took to reach the place."""
        points = self._points
        if place.total is not None and any(point.total is None for _, point in points):
            place = TrainingPosition(place.step, place.epoch)  # an earlier attempt reported no totals
        after = next((index for index, (_, point) in enumerate(points) if _is_after(point, place)), len(points))
        if after == 0:
            return 0.0
        (since_s, before), (until_s, beyond) = points[after - 1], points[min(after, len(points) - 1)]
        if after == len(points):  # the place is after the last report
            return self._find_beyond(place)
        first, last, here = _number(before, place), _number(beyond, place), _number(place, place)
        if not first <= here < last:  # the program's steps start again with each epoch or attempt
            return (since_s + until_s) / 2
        return since_s + (until_s - since_s) * (here - first) / (last - first)

    def _find_beyond(self, place: TrainingPosition) -> float:
        """The seconds for a place after the last point, at the pace of the last two points."""
        (before_s, before), (last_s, last) = self._points[-2:] if len(self._points) > 1 else self._points * 2
        steps, more = (
            _number(last, place) - _number(before, place),
            _number(place, place) - _number(last, place),
        )
        if more < 0 or (more and steps <= 0) or (place.total is None and place.epoch != last.epoch):
            return self.trained_s
        return min(last_s + ((last_s - before_s) * more / steps if more else 0.0), self.trained_s)


def _is_after(point: TrainingPosition, place: TrainingPosition) -> bool:
    if point.total is not None and place.total is not None:
        return point.total > place.total
    return (point.epoch, point.step) > (place.epoch, place.step)


def _number(point: TrainingPosition, place: TrainingPosition) -> int:
    """The number by which the point is compared with the place."""
    return point.total if point.total is not None and place.total is not None else point.step
