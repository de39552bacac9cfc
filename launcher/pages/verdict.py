"""The first part of a page: the outcome of the run, its cause and its cost, and the tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from launcher.pages.page_data import PageData
from launcher.pages.wording import render_duration, render_rate, render_times
from launcher.report.goodput import Goodput
from launcher.report.models import AttemptReport, TaskReport
from launcher.report.run_text import SHOWN_TASKS, group_by_end, render_end
from launcher.verdict.models import Verdict
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass

Tone = Literal["good", "bad", "live", "neutral"]
SHOWN_ATTEMPTS = 120

_RATE = re.compile(r"(?P<what>images|examples|samples|tokens|items|sequences)_per_s(?:ec(?:ond)?)?", re.IGNORECASE)
_KINDS = {
    "training": "training",
    "forming": "starting and forming",
    "connecting": "connecting and checking",
    "lost": "lost to a restart",
    "restarting": "restarting",
    "stalled": "stalled",
    "waiting": "waiting for a node",
    "ending": "ending",
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why the run ended.

    `place`: like `train.py:88`. `attempt`: the last attempt; None if no attempt had begun. `exception`: empty if the
    evidence contains it.
    """

    verdict: Verdict
    attempt: int | None
    node: str = ""
    exception: str = ""
    place: str = ""


@dataclass(frozen=True)
class Fact:
    """A number of the run; `key` is stable."""

    key: str
    label: str
    value: str


@dataclass(frozen=True)
class Portion:
    """Seconds of the run that were spent on one kind of work, and their share of the whole."""

    key: str
    label: str
    seconds: float
    share: float


@dataclass(frozen=True)
class TaskRow:
    """A task of the last attempt."""

    task: str
    node: str
    state: str
    failed: bool
    step: int | None
    epoch: int | None
    metrics: str


@dataclass(frozen=True)
class Outcome:
    """The first part of a page."""

    title: str
    tone: Tone
    cause: Cause | None
    facts: Sequence[Fact]
    portions: Sequence[Portion]
    """Empty if it is not known where the time went."""
    goodput: float | None
    attempts: Sequence[AttemptReport]
    left_out: str
    tasks: Sequence[TaskRow]
    ends: str
    """How many tasks have each end or state; empty if there are few tasks."""
    chaos: Sequence[str]


def make_outcome(data: PageData) -> Outcome:
    """The outcome of the run, or its state so far."""
    report, status = data.report, data.status
    goodput = report.goodput if report is not None else status.goodput if status is not None else None
    attempts = list(data.attempts)
    tasks = _make_tasks(data)
    shown = attempts if len(attempts) <= SHOWN_ATTEMPTS else [*attempts[:20], *attempts[20 - SHOWN_ATTEMPTS :]]
    return Outcome(
        title=_render_title(data),
        tone=_tone(data),
        cause=_find_cause(data),
        facts=[*_find_facts(data)],
        portions=[*_find_portions(goodput)] if goodput is not None else [],
        goodput=goodput.share if goodput is not None else None,
        attempts=shown,
        left_out=_render_left_out(data, len(attempts) - len(shown)),
        tasks=tasks,
        ends="; ".join(group_by_end({task.task: task.state for task in tasks})) if len(tasks) > SHOWN_TASKS else "",
        chaos=[fault.message for fault in report.chaos] if report is not None else [],
    )


def _render_title(data: PageData) -> str:
    if data.running:
        return f"Still {data.state}"
    titles = {"succeeded": "Succeeded", "failed": "Failed", "interrupted": "Interrupted", "lost": "Lost"}
    return titles.get(data.state, "Ended")


def _tone(data: PageData) -> Tone:
    if data.running:
        return "live"
    return "good" if data.state == "succeeded" else "bad" if data.state in ("failed", "lost") else "neutral"


def _find_cause(data: PageData) -> Cause | None:
    """The verdict, with the task and the line of code that caused it; None for a run that is still running."""
    last = data.attempts[-1] if data.attempts else None
    if data.report is not None:
        verdict = data.report.verdict
    elif data.running:
        return None
    elif data.state == "lost":
        message = "the controller of the run has ended without a report"
        followed = [f"the last attempt that had ended: {last.verdict.message}"] if last is not None else []
        verdict = Verdict(reference="lost", message=message, evidence=followed)
    else:
        return None
    # The verdict of the run is that of its last attempt, unless something else has ended the run.
    attempt = last if last is not None and last.verdict.message == verdict.message else None
    task = next((task for task in attempt.tasks if task.task == verdict.task), None) if attempt is not None else None
    crash = task.crash if task is not None else None
    shown = crash is not None and any(line.startswith(crash.exception) for line in verdict.evidence)
    return Cause(
        verdict=verdict,
        attempt=last.attempt if last is not None else None,
        node=task.node if task is not None else "",
        exception=f"{crash.exception}: {crash.message}" if crash is not None and not shown else "",
        place=f"{crash.file}:{crash.line}" if crash is not None and crash.file and crash.line else "",
    )


def _find_facts(data: PageData) -> Iterable[Fact]:
    report, status = data.report, data.status
    elapsed = (report.ended - report.started) if report is not None else data.end - data.started
    yield Fact("elapsed", "elapsed" if not data.running else "elapsed so far", render_duration(elapsed))
    yield Fact("restarts", "restarts", f"{_count_restarts(data):,}")
    rate = _find_step_rate(data)
    if rate is not None:
        yield Fact("steps-per-second", "steps per second", render_rate(rate))
    step = _find_last_step(data)
    if step is not None:
        yield Fact("step", "last step", f"{step:,}")
    for name, value in _find_rates(data):
        yield Fact("per-second", f"{name} per second", render_rate(value))
    cache = data.attempts[-1].compile_cache if data.attempts else None
    if cache is not None:
        yield Fact("compile-cache", "compile cache", f"{cache.loaded:,} loaded, {cache.stored:,} added")
    if report is not None:
        yield Fact("exit-status", "exit status", str(report.exit_status))
    tasks = data.task_names
    nodes = {task.node for attempt in data.attempts for task in attempt.tasks}
    nodes = nodes or ({task.node for task in status.tasks} if status is not None else set())
    if tasks:
        on = f" on {count_of(len(nodes), 'node')}" if nodes else ""
        yield Fact("tasks", "tasks", f"{len(tasks):,}{on}")
    ended = report.ended if report is not None else data.end
    yield Fact("time", "from, to" if not data.running else "from, to now", render_times(data.started, ended))


def _count_restarts(data: PageData) -> int:
    if data.status is not None:
        return data.status.restarts
    last = max((attempt.attempt for attempt in data.attempts), default=0)
    return max(last, max((record.attempt for record in data.records), default=0), 1) - 1


def _find_step_rate(data: PageData) -> float | None:
    """Steps per second of training, for the task with the most steps; restarts and gaps do not count."""
    best, rate = 0, None
    for task in data.task_names:
        pieces = [each.progress for each in data.tasks if each.task == task]
        pairs = [(before, after) for piece in pieces for before, after in pairwise(piece) if after.step >= before.step]
        steps = sum(after.step - before.step for before, after in pairs)
        seconds = sum(after.time - before.time for before, after in pairs)
        if steps > best and seconds > 0:
            best, rate = steps, steps / seconds
    if rate is not None:
        return rate
    times = [task.step_s for task in data.status.tasks] if data.status is not None else []
    last = data.attempts[-1] if data.attempts else None
    times += [task.progress.step_s for task in last.tasks if task.progress is not None] if last is not None else []
    known = [step_s for step_s in times if step_s]
    return 1 / max(known) if known else None


def _find_last_step(data: PageData) -> int | None:
    """The last step of the task that is furthest, as in the table of tasks; without a table, as last measured."""
    steps = [task.step for task in _make_tasks(data) if task.step is not None]
    last = max((each.attempt for each in data.tasks), default=0)
    steps = steps or [each.progress[-1].step for each in data.tasks if each.attempt == last and each.progress]
    return max(steps, default=None)


def _find_rates(data: PageData) -> Iterable[tuple[str, float]]:
    """Rates that the program itself reports, such as `images`, 1240.0: the last value from the first task with one."""
    found: dict[str, float] = {}
    for task in data.tasks:
        for sample in task.progress[-1:]:
            for name, value in sample.metrics.items():
                match = _RATE.fullmatch(name)
                if match is not None and value is not None and math.isfinite(value):
                    found.setdefault(match["what"].lower(), value)
    return found.items()


def _find_portions(goodput: Goodput) -> Iterable[Portion]:
    seconds = goodput.by_kind()
    whole = sum(seconds.values()) or 1.0
    for kind in sorted(seconds, key=list(_KINDS).index):
        if seconds[kind] > 0:
            yield Portion(kind, _KINDS[kind], seconds[kind], seconds[kind] / whole)


def _render_left_out(data: PageData, hidden: int) -> str:
    report = data.report
    out = report.left_out if report is not None else None
    parts = [f"{hidden:,} attempts in the middle are not shown"] if hidden else []
    if out is not None:
        counts = ", ".join(f"{count:,} {reference}" for reference, count in sorted(out.references.items()))
        parts.append(f"attempts {out.first:,} to {out.last:,} are only counted: {counts}")
    return "; ".join(parts)


def _make_tasks(data: PageData) -> list[TaskRow]:
    if data.status is not None and data.running:
        return [
            TaskRow(task.task, task.node, task.state, False, task.step, task.epoch, _render_metrics(task.metrics))
            for task in data.status.tasks
        ]
    last = data.attempts[-1] if data.attempts else None
    return [_make_task(task) for task in last.tasks] if last is not None else []


def _make_task(task: TaskReport) -> TaskRow:
    progress = task.progress
    failed = not task.stopped_by_us and not task.finished and task.exit_code != 0 and task.started is not None
    return TaskRow(
        task.task,
        task.node,
        render_end(task),
        failed,
        progress.step if progress is not None else None,
        progress.epoch if progress is not None else None,
        _render_metrics(progress.metrics) if progress is not None else "",
    )


def _render_metrics(metrics: dict[str, float | None]) -> str:
    shown = [f"{name} {value:.4g}" for name, value in metrics.items() if value is not None]
    return ", ".join(shown[:6]) + (" …" if len(shown) > 6 else "")
