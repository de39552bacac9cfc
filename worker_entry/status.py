"""What a task tells of itself while it runs: a record in a file, which its agent reads now and then.

A file and not a pipe: to write it never waits for a reader, and a reader that comes late finds what counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Optional

from worker_entry.after_import import after_import
from worker_entry.protocol import ProtocolError, parse
from worker_entry.values import TaskStatus

TENSORFLOW = "tensorflow"
STATUS_LIMIT = 64 << 10


def tell_phases(file: str) -> None:
    """From now on, the file says how far the program of this process has come."""
    tell = _writer(file)
    tell("has not imported TensorFlow")
    after_import(
        TENSORFLOW,
        lambda _: tell("has imported TensorFlow"),
        before=lambda: tell("is importing TensorFlow"),
    )


def read_status(file: str) -> Optional[TaskStatus]:
    """What it says now; None if that is nothing, or being written just now."""
    try:
        with open(file, "rb") as stream:
            status: TaskStatus = parse(TaskStatus, json.loads(stream.read(STATUS_LIMIT)), "status")
    except (OSError, ValueError, RecursionError, ProtocolError):
        return None
    return status


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
