"""Errors before or around a run: one exception class per category, each with its exit status.

A task that fails is an outcome, not an exception; see `report.models.RunReport`.
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
EXIT_NO_PROGRESS = 93
"""Asks the program that requeues jobs not to requeue this job; other launchers use the same number."""


class DistlaunchError(Exception):
    """An error that is shown as `Error: <message> [<reference>]`, followed by its evidence and its hint.

    Args:
        message: what happened, one sentence without a full stop.
        evidence: lines that support the message.
        hint: what to do.
    """

    reference = "error"
    exit_status = EXIT_INFRASTRUCTURE

    def __init__(self, message: str, *, evidence: Sequence[str] = (), hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = tuple(evidence)
        self.hint = hint

    def __str__(self) -> str:
        """The message, evidence and hint, for the traceback of a Python program."""
        return "\n  ".join(part for part in (self.message, *self.evidence, self.hint) if part)

    @property
    def sentence(self) -> str:
        """What happened and what to do, in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class SpecError(DistlaunchError):
    """The spec has errors; `evidence` has a line for each. Nothing was started."""

    reference = "spec"
    exit_status = EXIT_USAGE


class UsageError(DistlaunchError):
    """The command line asks for something impossible. Nothing was started."""

    reference = "usage"
    exit_status = EXIT_USAGE


class StartError(UsageError):
    """The program cannot be started on this machine: it is missing, for example. Nothing was started."""

    def __init__(self, reference: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reference = reference


class TooFewGpusError(UsageError):
    """A node has fewer GPUs than the spec asks for."""

    reference = "too-few-gpus"


class TfConfigTooLongError(UsageError):
    """TF_CONFIG names so many tasks that Linux starts no process with it."""

    reference = "tf-config-too-long"


class RunDirectoryError(DistlaunchError):
    """The run's folder cannot be used, for example because the disk is full, or the folder holds another run."""

    reference = "run-directory"
    exit_status = EXIT_INFRASTRUCTURE


class TakenOverError(DistlaunchError):
    """Another controller has taken over the run; this controller stops nothing."""

    reference = "taken-over"

    def __init__(self) -> None:
        super().__init__("another controller has taken this run over", hint="this controller stops nothing and exits")


class ProcessLimitError(DistlaunchError):
    """This user or container has reached its limit of processes or threads."""

    reference = "process-limit"

    def __init__(self) -> None:
        super().__init__(
            "no more processes or threads can be started here",
            hint="raise the limit (`ulimit -u`, or `pids.max` of the container), or stop other processes",
        )


class InterruptionError(DistlaunchError):
    """A signal interrupted a command before anything was started."""

    reference = "interrupted"

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}; nothing was started")
        self.exit_status = 128 + signum


class ShownError(DistlaunchError):
    """An error ended a run. The user has already seen the error, and the report contains it."""

    reference = "shown"

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def as_ours(error: Exception) -> Exception:
    """Converts the errors by which Python reports a process limit to ProcessLimitError; returns others unchanged."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    no_process = isinstance(error, BlockingIOError) and error.strerror == os.strerror(errno.EAGAIN)  # from fork
    return ProcessLimitError() if no_thread or no_process else error


def error_lines(message: str, reference: str, evidence: Sequence[str], hint: str) -> list[str]:
    """The lines that show an error: what happened, its evidence, what to do."""
    lines = [f"Error: {message} [{reference}]", *(f"  {line}" for line in evidence)]
    return [*map(printable, lines), *([printable(f"  {hint}")] if hint else [])]
