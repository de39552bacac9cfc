"""What can go wrong before or around a run, as exceptions: one class per category, each with its exit status.

A task that fails is not an exception but an outcome, which `results.RunReport` has.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

EXIT_OK = 0
EXIT_TASK_FAILED = 1
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 3
EXIT_BUG = 70


class DistlaunchError(Exception):
    """An error that is shown as `Error: <message> [<reference>]`, its evidence below, what to do last.

    Args:
        message: what happened, one sentence without a full stop.
        evidence: lines that show it.
        cure: what to do about it.
    """

    reference = "error"
    exit_status = EXIT_INFRASTRUCTURE

    def __init__(self, message: str, *, evidence: Sequence[str] = (), cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.cure = cure


class SpecError(DistlaunchError):
    """The spec has mistakes, each of them a line of `evidence`. Nothing was started."""

    reference = "spec"
    exit_status = EXIT_USAGE


class UsageError(DistlaunchError):
    """The command line asks for something impossible. Nothing was started."""

    reference = "usage"
    exit_status = EXIT_USAGE


class RunDirectoryError(DistlaunchError):
    """The files of the run cannot be written: the disk is full, permissions are missing, or another run's are there."""

    reference = "run-directory"
    exit_status = EXIT_INFRASTRUCTURE


class InterruptionError(DistlaunchError):
    """The user or the system interrupted a command before anything was started; nothing is left."""

    reference = "interrupted"

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}; nothing was started")
        self.exit_status = 128 + signum


def error_lines(message: str, reference: str, evidence: Sequence[str], cure: str) -> list[str]:
    """The one shape in which errors are shown: what happened, its evidence, what to do."""
    lines = [f"Error: {message} [{reference}]", *(f"  {line}" for line in evidence)]
    return [*lines, f"  {cure}"] if cure else lines
