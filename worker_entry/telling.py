"""What a task tells of itself while it runs: how far it has come, and, when asked, what it is doing.

Both go into files that its agent reads now and then: to write them never waits for a reader.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict

from worker_entry.after_import import after_import
from worker_entry.values import TaskStatus

TENSORFLOW = "tensorflow"
STACKS_SIGNAL = signal.SIGURG
"""Ignored by default, and by programs that do not know of it."""
OUT_OF_THE_WAY = 200
"""The program's own descriptors begin at 3, as they would without us."""


def tell_phases(file: str) -> None:
    """From now on, the file says how far the program of this process has come."""
    tell = _writer(file)
    tell("has not imported TensorFlow")
    after_import(
        TENSORFLOW,
        lambda _: tell("has imported TensorFlow"),
        before=lambda: tell("is importing TensorFlow"),
    )


def dump_on_signal(file: str) -> None:
    """From now on, SIGURG has the stacks of all threads appended to the file, also while they are blocked in C++."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, or a low limit of descriptors
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
        os.close(descriptor)
        faulthandler.register(STACKS_SIGNAL, file=moved, all_threads=True)


def _writer(file: str) -> Callable[[str], None]:
    process = os.getpid()

    def tell(phase: str) -> None:
        if os.getpid() != process:  # a child that the program has forked
            return
        temporary = f"{file}.new"
        with contextlib.suppress(OSError):  # a full disk, say, which is the program's trouble and not ours
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
                json.dump(asdict(TaskStatus(phase, time.time())), stream)
            os.replace(temporary, file)

    return tell
