"""`distlaunch status`: the state of a run, or its end."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.commands.requests import ask_status
from launcher.console.terminal import render_table
from launcher.errors import RunDirectoryError
from launcher.printable import printable
from launcher.report.goodput import render_goodput
from launcher.report.models import RunReport, TaskReport
from launcher.report.run_text import render_end
from launcher.report.status_report import RunStatus, TaskState
from launcher.report.status_text import COLUMNS, NODE_COLUMNS, make_node_rows, make_rows, render_header
from launcher.run.directory import RunDir
from launcher.run.journal_reading import Entry, read_last_entries, said_text
from launcher.run.log_reading import find_attempts
from launcher.run.queue import Queued, find_queued
from launcher.run.record import RunRecord, read_record
from launcher.wording import render_age
from worker_entry.system import clock

TAIL_BYTES = 64 << 10
ENDED = ("succeeded", "failed", "interrupted")
"""The states of a run that is over."""


def read_status(files: RunDir) -> RunStatus:
    """The status from the run's controller; for a run that has ended, from its report.

    Raises:
        RunDirectoryError: the run has ended and left no report.
        UsageError: the controller does not answer, or cannot be reached from here.
    """
    record = read_record(files)
    if (queued := find_queued(record)) is not None:
        return _make_waiting(files, record, queued)
    run_id, controller = files.read_run()
    if controller is not None:
        return RunStatus.model_validate(ask_status(files))
    try:
        report = RunReport.model_validate_json(files.report.read_bytes())
    except (OSError, ValueError):
        raise RunDirectoryError(
            f"run {run_id} is lost: its controller has ended without a report",
            hint=f"resume it: `distlaunch resume {files.root}`; or stop its leftover processes: `distlaunch clean`",
        ) from None
    last = report.attempts[-1] if report.attempts else None
    return RunStatus(
        run_id=report.run_id,
        name=report.name,
        directory=report.directory,
        state=report.outcome,
        attempt=last.attempt if last is not None else 0,
        restarts=max(last.attempt - 1, 0) if last is not None else 0,
        started=report.started,
        now=report.ended,
        tasks=[_make_task_state(task) for task in last.tasks] if last is not None else [],
        nodes=[],
        goodput=report.goodput,
    )


def _make_waiting(files: RunDir, record: RunRecord, queued: Queued) -> RunStatus:
    attempt = max(find_attempts(files), default=0)
    return RunStatus(
        run_id=record.run_id,
        name=record.run_id,
        directory=str(files.root),
        state="pending",
        attempt=attempt,
        restarts=max(attempt - 1, 0),
        started=record.started,
        now=clock.now(),
        tasks=[],
        nodes=[],
        waits_for=f"job {queued.job}: {queued.reason}",
    )


def render_status(status: RunStatus, said: Sequence[Entry]) -> list[str]:
    """The lines: the run, tables of its tasks and nodes, and the last messages, each with its age."""
    lines = [render_header(status)]
    if status.goodput is not None:
        lines.append(render_goodput(status.goodput))
    if status.tasks:
        lines += ["", *render_table(COLUMNS, make_rows(status)).splitlines()]
    if status.nodes:
        lines += ["", *render_table(NODE_COLUMNS, make_node_rows(status)).splitlines()]
    return [*lines, *([""] if said else []), *render_said(status, said)]


def render_said(status: RunStatus, said: Sequence[Entry]) -> list[str]:
    """The messages, each with its age."""
    lines = []
    for entry in said:
        first, *rest = printable(said_text(entry)).splitlines() or [""]
        lines += [f"{render_age(status.now - entry['time']):>12} ago  {first}", *(f"{'':18}{line}" for line in rest)]
    return lines


def read_said(files: RunDir, count: int) -> list[Entry]:
    """The last messages to the user."""
    entries, _ = read_last_entries(files.events, TAIL_BYTES)
    return [entry for entry in entries if entry["event"] == "said"][-count:]


def _make_task_state(task: TaskReport) -> TaskState:
    progress = task.progress
    return TaskState(
        task=task.task,
        node=task.node,
        state=render_end(task),
        address=task.address,
        unguarded=task.unguarded,
        pid=task.pid,
        epoch=progress.epoch if progress is not None else None,
        step=progress.step if progress is not None else None,
        step_s=progress.step_s if progress is not None else None,
        own_s=progress.own_s if progress is not None else None,
        metrics=progress.metrics if progress is not None else {},
        gpus=[],
    )
