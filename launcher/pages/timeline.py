"""The timeline: the states of each task over all attempts, and marks for events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.gang.events import (
    NodeLost,
    StacksReceived,
    TaskExited,
    TaskReported,
)
from launcher.pages.page_data import PageData
from launcher.pages.task_states import STATES, Span, TaskStateName, find_changes, make_spans
from launcher.pages.wording import render_duration, render_offset
from launcher.report.run_events import (
    AttemptEnded,
    Checkpoint,
    LinkDropped,
    LinkResumed,
    Record,
    Straggler,
)
from launcher.wording import count_of

MarkKind = Literal["failure", "link", "stall", "straggler", "restart", "checkpoint", "chaos"]
MARKS: Mapping[MarkKind, str] = {
    "failure": "failure",
    "link": "connection broken",
    "stall": "stall",
    "straggler": "slow worker",
    "restart": "restart",
    "checkpoint": "checkpoint",
    "chaos": "injected fault",
}
"""Every kind of mark, with its meaning."""

SPANS = 8000
"""Total spans of all rows: about 1 MB."""
LEAST_SPANS = 40
MARKED = 1500
"""Marks of the whole timeline; if there are more, marks close to another mark of the same kind are left out."""
ROWS = 256
NEAR = 0.012
"""The share of the run's duration that a mark covers on a wide screen."""
MARK_WIDTH = 16


@dataclass(frozen=True)
class Mark:
    """An event at a moment, in seconds since the start of the run."""

    at: float
    kind: MarkKind
    text: str
    shift: int = 0
    """How far it is moved to the right, in the page's pixels, to keep another mark visible."""


@dataclass(frozen=True)
class Row:
    """A task, or the whole run."""

    name: str
    node: str
    spans: Sequence[Span]
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run. `duration`: seconds of the run. `restarts`: when the attempts after the first began.

    Times are seconds since the start of the run.
    """

    duration: float
    rows: Sequence[Row]
    restarts: Sequence[float] = ()
    left_out: int = 0
    """Tasks that have no row."""

    @property
    def states(self) -> list[TaskStateName]:
        """The states that occur."""
        found = {span.state for row in self.rows for span in row.spans}
        return [state for state in STATES if state in found]

    @property
    def kinds(self) -> list[MarkKind]:
        """The kinds of marks that occur."""
        found = {mark.kind for row in self.rows for mark in row.marks}
        return [kind for kind in MARKS if kind in found]


def make_timeline(data: PageData) -> Timeline:
    """The timeline of all attempts in the journal."""
    duration = data.duration
    names = data.task_names
    rows = {name: _RowInWork() for name in names[:ROWS]}
    run = _RowInWork()
    attempts: dict[int, list[Record]] = {}
    for record in data.records:
        attempts.setdefault(record.attempt, []).append(record)
    numbers = sorted(number for number in attempts if number > 0)
    begins = [attempts[number][0].time for number in numbers]
    reports = {report.attempt: report for report in data.attempts}
    nodes = _find_nodes(data)
    for number, begin, following in zip(numbers, begins, (*begins[1:], data.end), strict=False):
        report = reports.get(number)
        ended = next((each.time for each in attempts[number] if isinstance(each.event, AttemptEnded)), following)
        tasks = {task.task: task for task in report.tasks} if report is not None else {}
        changes = find_changes(attempts[number], tasks, nodes, rows)
        for name, row in rows.items():
            row.add(name, make_spans(changes.get(name, ()), begin, ended, number), nodes.get(name, ""))
        if number > 1:
            run.marks.append(Mark(begin, "restart", f"attempt {number} began"))
        if report is not None and report.verdict.reference == "stalled":
            run.marks.append(Mark(ended, "stall", f"attempt {number}: {report.verdict.message}"))
    for record in data.records:
        _mark(record, rows, run)
    start = data.started
    made = [("the run", run), *rows.items()]
    limit = max(SPANS // max(len(made), 1), LEAST_SPANS)
    marks = sum(len(row.marks) for _, row in made)
    return Timeline(
        duration,
        [
            Row(
                name,
                row.node,
                merge([_shifted(span, start, duration) for span in row.spans], duration / limit),
                thin_marks([replace(mark, at=_clip(mark.at - start, duration)) for mark in row.marks], duration, marks),
            )
            for name, row in made
        ],
        [begin - start for number, begin in zip(numbers, begins, strict=True) if number > 1],
        len(names) - len(rows),
    )


def describe(name: str, span: Span) -> str:
    """The text that a pointer on the span shows."""
    when = f"{render_offset(span.begin)} to {render_offset(span.end)}, {render_duration(span.end - span.begin)}"
    if span.merged > 1:
        return f"{name}: {count_of(span.merged, 'short state')} up to attempt {span.attempt}, {when}"
    return f"{name}, attempt {span.attempt}: {STATES[span.state]}, {when}"


def merge(spans: Sequence[Span], least_s: float) -> list[Span]:
    """Merges spans that are too short to see with their neighbours; a merged span has the worst of their states."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and span.end - last.begin < least_s:
            state = max(last.state, span.state, key=_WORST.index)
            merged[-1] = Span(last.begin, span.end, state, span.attempt, last.merged + span.merged)
        else:
            merged.append(span)
    return merged


_WORST: Sequence[TaskStateName] = (
    "connecting",
    "importing",
    "forming",
    "finishing",
    "training",
    "succeeded",
    "held",
    "stopped",
    "lost",
    "failed",
)


def thin_marks(marks: Sequence[Mark], duration: float, count: int) -> list[Mark]:
    """The marks in order; if the timeline has very many marks, without those that would cover a mark of their kind."""
    ordered = sorted(marks, key=lambda mark: mark.at)
    if count <= MARKED:
        return _spread(ordered, duration)
    least_s, kept = duration / 200, []
    last: dict[MarkKind, float] = {}
    for mark in ordered:
        if mark.at - last.get(mark.kind, -least_s) >= least_s:
            kept.append(mark)
            last[mark.kind] = mark.at
    return kept


def _spread(marks: Sequence[Mark], duration: float) -> list[Mark]:
    """The marks, with marks of different kinds at nearly the same moment side by side."""
    spread: list[Mark] = []
    for mark in marks:
        last = spread[-1] if spread else None
        is_hidden = last is not None and mark.at - last.at < duration * NEAR and mark.kind != last.kind
        spread.append(replace(mark, shift=last.shift + MARK_WIDTH) if last is not None and is_hidden else mark)
    return spread


@dataclass
class _RowInWork:
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    node: str = ""
    injected: set[tuple[int, str]] = field(default_factory=set)

    def add(self, name: str, spans: Iterable[Span], node: str) -> None:
        self.spans += spans
        self.node = node


def _find_nodes(data: PageData) -> dict[str, str]:
    """The node of each task; the last node of a task that has moved."""
    found = {str(task.get("task")): str(task.get("node", "")) for task in data.planned}
    for report in data.attempts:
        found.update({task.task: task.node for task in report.tasks})
    if data.status is not None:
        found.update({task.task: task.node for task in data.status.tasks})
    return found


def _mark(record: Record, rows: Mapping[str, _RowInWork], run: _RowInWork) -> None:
    event = record.event
    match event:
        case TaskExited() if event.failed and str(event.task) in rows:
            row = rows[str(event.task)]
            is_stopped = any(span.state == "stopped" and span.attempt == record.attempt for span in row.spans)
            if not is_stopped:
                crash = f": {event.crash.exception}: {event.crash.message[:300]}" if event.crash is not None else ""
                row.marks.append(Mark(event.time, "failure", f"{event.task} ended with {event.exit}{crash}"))
        case NodeLost():
            run.marks.append(Mark(record.time, "failure", f"node {event.node} is lost: {event.reason}"))
        case LinkDropped():
            run.marks.append(Mark(record.time, "link", f"the connection to {event.node} broke: {event.reason}"))
        case LinkResumed():
            run.marks.append(Mark(record.time, "link", f"{event.node}: reconnected after {event.after_s:.1f} s"))
        case StacksReceived():
            run.marks.append(Mark(record.time, "stall", "all tasks were asked for their stacks"))
        case Straggler() if str(event.task) in rows:
            rows[str(event.task)].marks.append(Mark(record.time, "straggler", event.message))
        case Checkpoint():
            run.marks.append(Mark(event.time, "checkpoint", f"saved {event.name}"))
        case TaskReported() if event.injected and str(event.task) in rows:
            row = rows[str(event.task)]
            for fault in event.injected:
                if (record.attempt, fault) not in row.injected:
                    row.injected.add((record.attempt, fault))
                    row.marks.append(Mark(record.time, "chaos", f"injected: {fault}"))


def _shifted(span: Span, start: float, duration: float) -> Span:
    return replace(span, begin=_clip(span.begin - start, duration), end=_clip(span.end - start, duration))


def _clip(time: float, duration: float) -> float:
    return min(max(time, 0.0), duration) if math.isfinite(time) else 0.0
