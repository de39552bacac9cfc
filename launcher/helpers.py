"""Our own helper processes (ssh, kubectl, srun, the user's commands), as opposed to those of a run on this machine.

The end of a local run kills all processes below this one except helpers, so that nothing of the run is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

POLL_S = 0.02

_lock = threading.Lock()
_started: list[subprocess.Popen[Any]] = []


class LostStatusError(Exception):
    """The process has ended, but something else has taken its exit status."""


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a helper, with the options of Popen, in a session of its own: the terminal's Ctrl-C is ours to handle.

    Raises:
        OSError: the helper cannot be started.
        ValueError: a word has a null byte.
    """
    with _lock:
        process = subprocess.Popen(words, start_new_session=True, **options)
        _started[:] = [process, *(each for each in _started if each.returncode is None)]
    return process


@contextlib.contextmanager
def spared() -> Iterator[set[int]]:
    """The pids of all helpers; meanwhile, no helper starts."""
    with _lock:
        yield {process.pid for process in _started if process.returncode is None}


def kill(process: subprocess.Popen[Any]) -> None:
    """Kills the helper, unless it has ended by itself, with its process group: a shell may have started the program."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait(process: subprocess.Popen[Any], limit_s: float) -> int:
    """Returns the exit status of the process. Popen's own `wait` takes a lost status for a success.

    Raises:
        TimeoutExpired: the process has not ended in time.
        LostStatusError: the exit status is unknown.
    """
    until = time.monotonic() + limit_s
    while process.returncode is None and hasattr(os, "waitid"):  # macOS has it from Python 3.13
        try:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
        except ChildProcessError:
            raise LostStatusError from None
        if time.monotonic() >= until:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        time.sleep(POLL_S)
    return process.wait(max(until - time.monotonic(), 0.0))
