"""`distlaunch status`: the state of a run, or its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from launcher.commands.requests import ask_status
from launcher.printable import printable
from launcher.report.goodput import SHORT_S, render_goodput
from launcher.report.journal_line import Message
from launcher.report.state_names import Outcome
from launcher.report.status_report import RunStatus
from launcher.report.status_text import COLUMNS, NODE_COLUMNS, make_node_rows, make_rows, render_header
from launcher.report.table import render_table
from launcher.rundir.directory import RunDir
from launcher.rundir.last_state import read_last_status
from launcher.rundir.logs import find_attempts
from launcher.rundir.names import name_run
from launcher.rundir.queued import Queued, find_queued
from launcher.rundir.record import RecordedRun, RunRecord, read_record
from launcher.rundir.summary import find_controller, summarize
from launcher.wording import render_ago
from worker_entry.system import clock

TAIL_BYTES = 64 << 10
ENDED = (*get_args(Outcome), "lost", "ended")
"""The states of a run without a controller."""
TimedMessage = tuple[float, Message]
"""When it was shown, in Unix seconds, and the message."""


def read_status(files: RunDir) -> RunStatus:
    """The status from the run's controller; for a run that has none, the last known one.

    Raises:
        RunDirectoryError: the folder is not a run's folder.
        UsageError: the controller does not answer, or cannot be reached from here.
    """
    record = read_record(files)
    if (queued := find_queued(record)) is not None:
        return _make_waiting(files, record, queued)
    if find_controller(files, record) is not None:
        return ask_status(files)
    return read_last_status(files, summarize(files))


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


def render_status(status: RunStatus, messages: Sequence[TimedMessage], room: int | None) -> list[str]:
    """The lines: the run, tables of its tasks and nodes, and the last messages, each with its age.

    Args:
        status: the status.
        messages: the messages, with their times.
        room: the width of the tables; None for no limit.
    """
    lines = [render_header(status)]
    if status.goodput is not None and sum(status.goodput.by_kind().values()) >= SHORT_S:
        lines.append(render_goodput(status.goodput))
    if status.tasks:
        lines += ["", *render_table(COLUMNS, make_rows(status), room)]
    if status.nodes:
        lines += ["", *render_table(NODE_COLUMNS, make_node_rows(status), room)]
    return [*lines, *([""] if messages else []), *render_messages(status, messages)]


def render_messages(status: RunStatus, messages: Sequence[TimedMessage]) -> list[str]:
    """The messages, each with its age."""
    lines = []
    for moment, message in messages:
        first, *rest = printable(message.text).splitlines() or [""]
        lines += [f"{render_ago(moment, status.now):>16}  {first}", *(f"{'':18}{line}" for line in rest)]
    return lines


def describe_lost(files: RunDir) -> str:
    """What a user can do about a run whose controller is gone."""
    return (
        f"The controller of this run is gone; resume the run: `distlaunch resume {name_run(files.root)}`; "
        f"or stop what is left of it: `distlaunch clean {name_run(files.root)}`"
    )


def read_messages(files: RunDir, count: int) -> list[TimedMessage]:
    """The last messages to the user."""
    lines, _ = RecordedRun(files).read_journal(TAIL_BYTES)
    return [(line.time, message) for line in lines if (message := line.message) is not None][-count:]
