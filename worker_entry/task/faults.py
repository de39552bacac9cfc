"""Injects the faults of `--chaos` into this process, each at its moment."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
from collections.abc import Callable, Sequence

from worker_entry.protocol.values import Injection, Progress
from worker_entry.task import saves
from worker_entry.task.status_file import StatusFile

PREEMPTION_GRACE_S = 30.0
"""The time from TERM to KILL, as on cloud platforms."""
EXIT_STATUS = 1


def install(injections: Sequence[Injection], status: StatusFile, watchers: list[Callable[[Progress], None]]) -> None:
    """Schedules the faults; adds the faults at an epoch or a step to `watchers`.

    These are called when training begins, and after each step.
    """
    for injection in injections:
        if injection.at == "seconds":
            _later(injection.value, functools.partial(_inject, injection, status))
        elif injection.at == "save":
            saves.watch(_Save(injection, status))
        else:
            watchers.append(_Moment(injection, status))


class _Moment:
    """Waits for the end of an epoch or a step, then injects the fault."""

    def __init__(self, injection: Injection, status: StatusFile) -> None:
        self._injection = injection
        self._status = status
        self._done = False

    def __call__(self, progress: Progress) -> None:
        reached = progress.epoch if self._injection.at == "epoch" else progress.step
        if not self._done and reached is not None and reached >= self._injection.value:
            self._done = True
            self._status.report_progress(progress)
            _inject(self._injection, self._status)


class _Save:
    """Waits for a checkpoint of this process, by its number from 1, and injects the fault in the middle of its write.

    That is: only half of each file is there.
    """

    def __init__(self, injection: Injection, status: StatusFile) -> None:
        self._injection = injection
        self._status = status
        self._count = 0

    def __call__(self, path: str) -> None:
        self._count += 1
        if self._count != self._injection.value:
            return
        for part in saves.find_parts(path):
            os.truncate(part, os.path.getsize(part) // 2)
        _inject(self._injection, self._status, path)


def _inject(injection: Injection, status: StatusFile, path: str = "") -> None:
    status.report_injection(str(injection))
    process = os.getpid()
    if injection.what == "kill":
        os.kill(process, signal.SIGKILL)
    elif injection.what == "stop":
        os.kill(process, signal.SIGSTOP)
    elif injection.what == "exit":
        os._exit(EXIT_STATUS)
    elif injection.what == "full-disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    elif injection.what == "preempt":
        _later(PREEMPTION_GRACE_S, lambda: os.kill(process, signal.SIGKILL))
        os.kill(process, signal.SIGTERM)


def _later(seconds: float, then: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, then)
    timer.daemon = True
    timer.start()
