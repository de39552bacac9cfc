"""Requests to a run's controller."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.run.controller import is_alive, send_signal
from launcher.run.directory import RunDir
from launcher.run.interrupts import STACKS_SIGNAL

POLL_S = 0.05


def ask_stacks(files: RunDir, within_s: float = 15.0) -> str:
    """The stacks of all tasks of the run, collected by its controller.

    Raises:
        UsageError: the run has ended, or does not answer.
    """
    run_id, controller = files.read_run()
    before = _written_at(files.stacks)
    if controller is None or not send_signal(controller, STACKS_SIGNAL):
        raise UsageError(f"run {run_id} has ended")
    deadline = time.monotonic() + within_s
    while _written_at(files.stacks) == before:
        if not is_alive(controller):
            raise UsageError(f"run {run_id} has ended")
        if time.monotonic() > deadline:
            raise UsageError(f"run {run_id} did not show its stacks within {within_s:g} s")
        time.sleep(POLL_S)
    return files.stacks.read_text(encoding="utf-8")


def ask_to_end(files: RunDir, within_s: float = 120.0) -> bool:
    """Asks the run's controller to stop the run, and waits for its exit; returns whether the run was running.

    Raises:
        RunDirectoryError: the controller is still running after `within_s`.
        UsageError: the controller cannot be asked from here.
    """
    run_id, controller = files.read_run()
    if controller is None or not send_signal(controller, signal.SIGTERM):
        return False
    deadline = time.monotonic() + within_s
    while is_alive(controller):
        if time.monotonic() > deadline:
            raise RunDirectoryError(
                f"run {run_id} has not ended within {within_s:g} s", hint=f"see its terminal, or {files.root}"
            )
        time.sleep(POLL_S)
    return True


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
