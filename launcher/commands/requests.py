"""Sends requests to the controller of a run."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from typing import Any

from launcher.errors import RunDirectoryError, UsageError
from launcher.report.models import Collection
from launcher.report.status_report import RunStatus
from launcher.rundir import control
from launcher.rundir.control import AskFiles, AskProfile, AskStacks, AskStatus, AskStop, RefusedError, Request
from launcher.rundir.directory import RunDir
from launcher.rundir.names import name_run
from launcher.rundir.owner import Controller, ElsewhereError, is_alive
from launcher.rundir.queued import cancel, find_queued, look_up
from launcher.rundir.record import RunRecord, read_record

ANSWER_S = 20.0
END_S = 120.0
"""How long a run may take to end."""
CLOSING_S = 1.0
"""How long an ended controller may still be seen: the kernel closes a process's files before the process is gone."""
POLL_S = 0.05


class RunEndedError(UsageError):
    """The run to be asked has ended."""


def ask_status(files: RunDir) -> RunStatus:
    """The status of the run, from its controller.

    Raises:
        UsageError: the run has ended, or its controller does not answer, or is of a version with another status.
    """
    answer = _ask(files, AskStatus())[0]
    try:
        return RunStatus.read(json.loads(answer))
    except ValueError:
        raise UsageError(
            f"the controller of run {files.root.name} is of another version of distlaunch, whose status cannot be read",
            hint="`distlaunch logs`, `attach` and `down` work with it",
        ) from None


def ask_stacks(files: RunDir) -> str:
    """The stacks of all tasks of the run, collected by its controller.

    Raises:
        UsageError: the run has ended, or its controller does not answer.
    """
    return _ask(files, AskStacks())[0].decode("utf-8")


def ask_files(files: RunDir, *, begins: bool = False, patterns: Sequence[str] = ()) -> Collection:
    """The progress of the controller's file collection; with `begins`, starts to collect files of these patterns.

    Raises:
        UsageError: the run has ended, or its controller does not answer.
    """
    return Collection.model_validate_json(_ask(files, AskFiles(begins, [*patterns]))[0])


def ask_profile(files: RunDir, duration_s: float) -> str:
    """The controller's answer to AskProfile: a profile of all tasks of the run.

    Raises:
        UsageError: the run has ended, or its controller does not answer.
    """
    request = AskProfile(duration_s)
    return _ask(files, request, request.limit_s + ANSWER_S)[0].decode("utf-8")


def ask_to_stop_now(files: RunDir) -> None:
    """Asks the run's controller to stop the run without a grace period; does not wait.

    Raises:
        UsageError: the run has ended, or its controller does not answer.
    """
    _ask(files, AskStop(now=True))[1].close()


def ask_to_end(files: RunDir, *, now: bool = False, within_s: float = END_S) -> bool:
    """Asks the run's controller to stop the run, and waits for its end; returns whether the run was running.

    Raises:
        RunDirectoryError: the controller is still running after `within_s`.
        UsageError: the controller cannot be asked from here.
    """
    record = read_record(files)
    if find_queued(record) is not None:
        cancel(record.job)
        files.note_cancelled(128 + signal.SIGTERM)
        return True
    try:
        run_id, controller = files.read_run()
    except ElsewhereError:
        if not record.job:
            raise
        return _cancel(record, now=now, within_s=within_s)
    if controller is None:
        return False
    deadline = time.monotonic() + within_s
    was_asked = False
    with contextlib.suppress(RunEndedError):  # it has just ended by itself
        connection = _ask(files, AskStop(now))[1]
        was_asked = True
        control.wait_for_end(connection, within_s)
    if not _is_gone(controller, deadline):
        raise RunDirectoryError(
            f"run {run_id} has not ended within {within_s:g} s",
            hint=f"see `distlaunch logs --distlaunch {name_run(files.root)}`",
        )
    return was_asked


def _cancel(record: RunRecord, *, now: bool, within_s: float) -> bool:
    """Stops a run by cancelling its job, on whose node the controller runs."""
    cancel(record.job, now=now)
    deadline = time.monotonic() + within_s
    while (queued := look_up(record.job)) is not None and not queued.has_ended:
        if time.monotonic() > deadline:
            raise RunDirectoryError(f"job {record.job} has not ended within {within_s:g} s", hint="see `squeue`")
        time.sleep(POLL_S * 10)
    return True


def _ask(files: RunDir, request: Request, within_s: float = ANSWER_S) -> tuple[bytes, Any]:
    run_id, controller = files.read_run()
    if controller is None:
        raise RunEndedError(f"run {run_id} has ended")
    path = read_record(files).socket
    try:
        return control.ask(path, controller.pid, request, within_s)
    except RefusedError as error:
        raise UsageError(f"run {run_id}: {error}") from None
    except OSError as error:
        if _is_gone(controller, time.monotonic() + CLOSING_S):
            raise RunEndedError(f"run {run_id} has ended") from None
        raise UsageError(
            f"the controller of run {run_id} does not answer",
            evidence=[f"{path}: {error.strerror or error}"],
            hint=f"SIGTERM to the controller, process {controller.pid}, stops the run",
        ) from None


def _is_gone(controller: Controller, deadline: float) -> bool:
    """Whether a controller that has closed its connection, or not answered, has ended by this time.monotonic()."""
    while is_alive(controller):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
