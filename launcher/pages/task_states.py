"""The states of each task over time, from the events of an attempt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from launcher.gang.events import NodeLost, TaskExited, TaskHalted, TaskListening, TaskReported, TaskStarted
from launcher.report.models import TaskReport
from launcher.report.run_events import Record, State
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import HAS_IMPORTED

TaskStateName = Literal[
    "connecting", "importing", "forming", "training", "finishing", "held", "succeeded", "stopped", "failed", "lost"
]
STATES: Mapping[TaskStateName, str] = {
    "connecting": "connecting and checking",
    "importing": "starting and importing",
    "forming": "forming the cluster, first step",
    "training": "training",
    "finishing": "ending after training or a stop",
    "held": "stopped by a signal",
    "succeeded": "succeeded",
    "stopped": "stopped by distlaunch",
    "failed": "failed",
    "lost": "node lost",
}
"""Every state of a task, with its meaning."""


@dataclass(frozen=True)
class Span:
    """A state and when it began and ended, in seconds since the start of the run."""

    begin: float
    end: float
    state: TaskStateName
    attempt: int
    merged: int = 1
    """How many spans were merged into this span, because they are too short to see."""


Change = tuple[float, "TaskStateName | None"]
"""A moment, and the state from then on; None: back to the previous state."""


def find_changes(
    records: Sequence[Record], reports: Mapping[str, TaskReport], nodes: Mapping[str, str], rows: Iterable[str]
) -> dict[str, list[Change]]:
    """The changes of state of each task in one attempt."""
    changes: dict[str, list[Change]] = {}
    steps = {
        str(record.event.task)
        for record in records
        if isinstance(record.event, TaskReported) and record.event.progress is not None
    }
    stopping = False
    for record in records:
        event = record.event
        if isinstance(event, State) and event.state == "forming":
            # The order to start. If tasks are forked, the node imports for all of them before the first task starts.
            for name in rows:
                changes.setdefault(name, []).append((record.time, "importing"))
        elif isinstance(event, State) and event.state == "stopping":
            stopping = True
            for name, found in changes.items():
                report = reports.get(name)
                if not (report is not None and report.ended is not None and report.ended <= record.time):
                    found.append((record.time, "finishing"))
        elif isinstance(event, NodeLost):
            for name in rows:
                if nodes.get(name) == event.node:
                    changes.setdefault(name, []).append((record.time, "lost"))
        elif isinstance(event, TaskStarted):
            changes.setdefault(str(event.task), []).append((event.time, "importing"))
        elif isinstance(event, TaskHalted):
            state: TaskStateName | None = None if event.signal is None else "held"
            changes.setdefault(str(event.task), []).append((event.time, state))
        elif isinstance(event, TaskListening) and str(event.task) not in steps:
            # A program that reports no steps gives no other sign of training.
            changes.setdefault(str(event.task), []).append((event.time, "training"))
        elif isinstance(event, TaskReported) and not stopping:
            changes.setdefault(str(event.task), []).extend(_find_reported(event))
        elif isinstance(event, TaskExited):
            report = reports.get(str(event.task))
            by_us = report.stopped_by_us if report is not None else stopping
            ended: TaskStateName = "stopped" if by_us else "failed" if event.failed else "succeeded"
            changes.setdefault(str(event.task), []).append((event.time, ended))
    return changes


def _find_reported(event: TaskReported) -> Iterator[Change]:
    progress = event.progress
    if progress is not None and progress.first_step is not None:
        yield (progress.began, "training") if progress.training else (event.since, "finishing")
    elif progress is not None or event.phase in HAS_IMPORTED:
        yield event.since, "forming"


def make_spans(changes: Iterable[Change], begin: float, end: float, attempt: int) -> Iterator[Span]:
    """The spans between the changes; changes after a task's end are ignored unless it is started again."""
    states: list[TaskStateName] = ["connecting"]
    since = begin
    finite = [change for change in changes if math.isfinite(change[0])]
    for time, state in sorted(finite, key=lambda change: change[0]):
        if states[-1] in ("succeeded", "stopped", "failed") and state != "importing":
            continue
        at = min(max(time, since), end)
        following = state if state is not None else states[-2] if len(states) > 1 else "training"
        if following == states[-1]:
            continue
        if at > since:
            yield Span(since, at, states[-1], attempt)
        states.append(following)
        since = at
    if end > since or states[-1] in ("succeeded", "stopped", "failed"):
        yield Span(since, max(end, since), states[-1], attempt)
