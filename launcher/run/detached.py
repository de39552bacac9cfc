"""A run in the background: its controller is a process in a session of its own.

The process that the user started waits until the cluster is up, or the run has ended before that; until then the
controller writes to the user's terminal as in the foreground.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.console.writer import Console
from launcher.errors import as_ours


class Detachment:
    """The controller's side of a run in the background; `pipe` leads to the process that waits."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def leave(self, console: Console, directory: Path) -> None:
        """Lets the waiting process end, and gives up its terminal."""
        if self._pipe < 0:
            return
        console.leave()
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(devnull, descriptor)
        os.close(devnull)
        with contextlib.suppress(OSError):  # it may have been killed
            os.write(self._pipe, os.fsencode(directory))
        os.close(self._pipe)
        self._pipe = -1


def run_detached(run: Callable[[Detachment], int]) -> tuple[int | None, Path | None]:
    """Runs in a child process until the child leaves; in the child, returns the run's exit status at its end.

    Returns:
        The exit status of a run that has ended, or the folder of one that is up.

    Raises:
        ProcessLimitError: no process can be started.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        child = os.fork()
    except OSError as error:
        raise as_ours(error) from None
    if child == 0:
        os.close(reading)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        return run(Detachment(writing)), None
    os.close(writing)
    with _passing_signals(child), os.fdopen(reading, "rb") as pipe:
        directory = pipe.read()
        if directory:
            return None, Path(os.fsdecode(directory))
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), None


@contextlib.contextmanager
def _passing_signals(child: int) -> Iterator[None]:
    """Passes on Ctrl-C and SIGTERM: until the cluster is up, the run is the user's foreground command."""

    def pass_on(signum: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)  # our own child, which nobody else can have waited for

    previous = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
