"""Reads the status files and crash records of a task's processes, and merges them into one status and one crash record.

The task's own process takes precedence. A child process's status counts if the child trains and the task's own process
does not; its crash record counts if the task has failed because of the child.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import Optional

from worker_entry.protocol.file_names import LOCK, AttemptFiles
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import CrashRecord, ModelDigest, TaskStatus

STATUS_LIMIT = 224 << 10
FOLLOWS_S = 30.0
"""A program that fails because of a child process ends within this time; an interpreter takes some time to exit."""
PASSED_ON = ("CalledProcessError", "SystemExit")
"""Exceptions that a program raises when a child process has failed."""


class StatusFiles:
    """A task's files, and the content that was last read from them."""

    def __init__(self, files: AttemptFiles, task: str) -> None:
        self._files = files
        self._task = task
        self._epoch_ended = 0.0
        """The time of the last end of an epoch that was returned; a new controller has it as well."""
        self.forget_last()

    def forget_last(self) -> None:
        """Makes the next `read_changed` report everything that is in the files."""
        self._last: tuple[bytes, bytes, bool] = (b"", b"", False)
        self._model: Optional[ModelDigest] = None

    def read_changed(self) -> Optional[TaskStatus]:
        """Returns the program's status; None if it has not changed since the last call.

        The digest of the model, which may be long, and ends of epochs are in the status only if they are new.
        """
        child_file = self._files.child(self._task)
        written = _read(child_file)
        current = _read(self._files.status(self._task)), written, bool(written) and _is_locked(f"{child_file}{LOCK}")
        if current == self._last:
            return None
        self._last = current
        status = _merge(_parse(current[0]), _parse(written), is_running=current[2])
        if status is None:
            return None
        if status.progress is not None:
            news = [end for end in status.progress.epoch_ends if end.time > self._epoch_ended]
            self._epoch_ended = news[-1].time if news else self._epoch_ended
            status = replace(status, progress=replace(status.progress, epoch_ends=news))
        if status.model == self._model:
            return replace(status, model=None)
        self._model = status.model
        return status

    def load_own_crash(self) -> Optional[CrashRecord]:
        """Returns the exception that the task's own process has recorded so far."""
        return _load_crash(self._files.crash(self._task))

    def load_crash(self, ended: float) -> Optional[CrashRecord]:
        """Returns the exception that ended the task at the time `ended`; None if there was none."""
        own, child = (_load_crash(file(self._task)) for file in (self._files.crash, self._files.child_crash))
        if child is not None and ended - child.time < FOLLOWS_S and (own is None or own.exception in PASSED_ON):
            return child
        return own


def _merge(own: Optional[TaskStatus], child: Optional[TaskStatus], *, is_running: bool) -> Optional[TaskStatus]:
    if child is None or child.progress is None or (own is not None and own.progress is not None):
        return own or child
    if not is_running:
        child = replace(child, progress=replace(child.progress, training=False))
    if own is None:
        return child
    return replace(own, phase=child.phase, since=child.since, progress=child.progress, model=child.model)


def _load_crash(file: str) -> Optional[CrashRecord]:
    try:
        with open(file, encoding="utf-8") as stream:
            record: CrashRecord = parse(CrashRecord, json.load(stream), "crash record")
    except (OSError, ValueError, RecursionError, ProtocolError):  # not written, or by another program
        return None
    return record


def _read(file: str) -> bytes:
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        return stream.read(STATUS_LIMIT)
    return b""


def _parse(text: bytes) -> Optional[TaskStatus]:
    with contextlib.suppress(ValueError, RecursionError, ProtocolError):  # not written, or by another program
        status: TaskStatus = parse(TaskStatus, json.loads(text), "status")
        return status
    return None


def _is_locked(file: str) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDWR)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
    return False
