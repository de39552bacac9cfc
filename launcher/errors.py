"""What can go wrong before or around a run, as exceptions: one class per category, each with its exit status.

A task that fails is not an exception but an outcome, which `results.RunReport` has.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence

from launcher.printable import printable

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
        hint: what to do about it.
    """

    reference = "error"
    exit_status = EXIT_INFRASTRUCTURE

    def __init__(self, message: str, *, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.hint = hint

    @property
    def sentence(self) -> str:
        """What happened and what to do, where there is one line for both."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class SpecError(DistlaunchError):
    """The spec has mistakes, each of them a line of `evidence`. Nothing was started."""

    reference = "spec"
    exit_status = EXIT_USAGE


class UsageError(DistlaunchError):
    """The command line asks for something impossible. Nothing was started."""

    reference = "usage"
    exit_status = EXIT_USAGE


class TooFewGpusError(UsageError):
    """A node has fewer GPUs than the spec asks for."""

    reference = "too-few-gpus"


class RunDirectoryError(DistlaunchError):
    """The files of the run cannot be written: the disk is full, permissions are missing, or another run's are there."""

    reference = "run-directory"
    exit_status = EXIT_INFRASTRUCTURE


class ProcessLimitError(DistlaunchError):
    """The system allows this user, or this container, no more processes or threads."""

    reference = "process-limit"

    def __init__(self) -> None:
        super().__init__(
            "no more processes or threads can be started here",
            hint="raise the limit (`ulimit -u`, or `pids.max` of the container), or end what is not needed",
        )


class InterruptionError(DistlaunchError):
    """The user or the system interrupted a command before anything was started; nothing is left."""

    reference = "interrupted"

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}; nothing was started")
        self.exit_status = 128 + signum


class ShownError(DistlaunchError):
    """An error has ended a run that was under way. The user has been shown it, and it is in the report."""

    reference = "shown"

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def as_ours(error: Exception) -> Exception:
    """The error that it means, where Python says by one of its own that the system's limit is reached."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    no_process = isinstance(error, BlockingIOError) and error.strerror == os.strerror(errno.EAGAIN)  # as fork says it
    return ProcessLimitError() if no_thread or no_process else error


def error_lines(message: str, reference: str, evidence: Sequence[str], hint: str) -> list[str]:
    """The one shape in which errors are shown: what happened, its evidence, what to do."""
    lines = [f"Error: {message} [{reference}]", *(f"  {line}" for line in evidence)]
    return [*map(printable, lines), *([printable(f"  {hint}")] if hint else [])]
