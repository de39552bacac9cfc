"""The input of a page: the data of a run as values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.report.models import AttemptReport, RunReport
from launcher.report.run_events import Record
from launcher.report.samples import NodeUseSample, ProgressSample, Sample, TaskUseSample
from launcher.report.status_report import RunStatus
from worker_entry.protocol.frozen import dataclass, field, replace

LAST_MOMENT = 1e11
"""A time in Unix seconds that is later than any valid time."""
MOST_STEPS = 10**15


@dataclass(frozen=True, kw_only=True)
class TaskSamples:
    """The measurements of a task in one attempt, in order."""

    attempt: int
    task: str
    progress: Sequence[ProgressSample] = ()
    use: Sequence[TaskUseSample] = ()


@dataclass(frozen=True, kw_only=True)
class NodeSamples:
    """The measurements of a node in one attempt, in order."""

    attempt: int
    node: str
    use: Sequence[NodeUseSample] = ()


@dataclass(frozen=True)
class LogEnd:
    """The last lines of a task's log."""

    attempt: int
    task: str
    path: str
    """Relative to the run's folder."""
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PageData:
    """All data of a run that its page shows. Unknown values are None or empty."""

    run_id: str
    name: str
    """The name of the cluster."""
    directory: str
    state: str
    """`succeeded`, `running`, `lost`, …"""
    running: bool
    """Whether the run is still running."""
    started: float
    """Unix seconds, like all times."""
    ended: float | None
    """When the run ended; for a lost run, when its controller last wrote a file; None while the run is running."""
    now: float
    """When the run was read."""
    report: RunReport | None = None
    """The run's report, once the run is over."""
    status: RunStatus | None = None
    """The status from the controller, while the run is running."""
    attempts: Sequence[AttemptReport] = ()
    """The attempts that are over."""
    records: Sequence[Record] = ()
    """The journal."""
    skipped: bool = False
    """Whether the middle of the journal was too long to be read."""
    tasks: Sequence[TaskSamples] = ()
    nodes: Sequence[NodeSamples] = ()
    logs: Sequence[LogEnd] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    """plan.json."""
    spec: str = ""
    """spec.json, in which secrets are hidden."""
    stacks: str = ""
    """stacks.txt."""
    command: str = ""
    """The command that the user typed, without secrets; empty if it was not recorded."""
    cwd: str = ""
    """The folder in which the command was typed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The known versions of distlaunch, Python and TensorFlow."""

    @property
    def end(self) -> float:
        """The last moment of the page."""
        return max(self.ended if self.ended is not None else self.now, self.started)

    @property
    def duration(self) -> float:
        """Seconds from the start to the end; never 0."""
        return max(self.end - self.started, 1e-3)

    @property
    def planned(self) -> list[Mapping[str, Any]]:
        """The tasks of plan.json, which is not trusted."""
        tasks = self.plan.get("tasks")
        return [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []

    @property
    def task_names(self) -> list[str]:
        """Every task of the run, in order: those of the plan first."""
        names = [str(task.get("task", "")) for task in self.planned]
        names += [task.task for attempt in self.attempts for task in attempt.tasks]
        names += [task.task for task in self.status.tasks] if self.status is not None else []
        names += [samples.task for samples in self.tasks]
        return list(dict.fromkeys(filter(None, names)))


def clean(data: PageData) -> PageData:
    """The data with only valid times; its end is not before its start.

    Files may be damaged, or come from anywhere.
    """
    started = data.started if is_moment(data.started) else 0.0
    now = data.now if is_moment(data.now) else started
    ended = data.ended
    if ended is not None:
        ended = max(ended, started) if is_moment(ended) else started
    return replace(
        data,
        started=started,
        now=max(now, started),
        ended=ended,
        records=[record for record in data.records if is_moment(record.time)],
        tasks=[
            replace(each, progress=[*filter(_is_sane, each.progress)], use=[*filter(_is_sane, each.use)])
            for each in data.tasks
        ],
        nodes=[replace(each, use=[*filter(_is_sane, each.use)]) for each in data.nodes],
    )


def is_moment(time: float) -> bool:
    return math.isfinite(time) and 0 <= time < LAST_MOMENT


def _is_sane(sample: Sample) -> bool:
    return is_moment(sample.time) and not (isinstance(sample, ProgressSample) and abs(sample.step) > MOST_STEPS)
