"""Waits for changes of a run's files, without polling, until the run is over."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.errors import RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.queued import ASK_SLURM_S, find_queued
from launcher.rundir.record import RunRecord, read_record
from launcher.rundir.summary import summarize

NAMES = (".log", "attempt-", "run.json", "events.jsonl")
"""Parts of the names of new files that matter to a reader."""
ASK_S = 1.0
"""How often to look at the controller's process."""
STAT_S = 1.0
"""How often the caller checks the files anyway: inotify does not see writes from other machines."""
PAUSE_S = 0.05
"""The least time between two wake-ups, for programs that print all the time."""
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_EVENT = struct.Struct("iIII")
_NON_BLOCKING = os.O_NONBLOCK | os.O_CLOEXEC


class Wakeup(NamedTuple):
    """Something has changed. `over`: the run was over before, so this is the last; `readable`: descriptors to read."""

    over: bool
    readable: Collection[int]


def wait_for_changes(
    run: RunWatch,
    paths: Callable[[], Iterable[Path]],
    *,
    stdout: int | None = None,
    readable: Collection[int] = (),
) -> Iterator[Wakeup]:
    """Yields at once, and again whenever one of the paths has changed or one of the descriptors can be read.

    Raises:
        BrokenPipeError: the reader of `stdout` is gone.
    """
    watch = FileWatch(*NAMES)
    found: Collection[int] = ()
    try:
        while True:
            over = run.is_over()  # asked before the caller reads: nothing is missed
            yield Wakeup(over, found)
            if over:
                return
            found = ()
            if not watch.add(paths()):  # a new path may have changed since the caller's look
                found = watch.wait(readable, until_closed=stdout)
    finally:
        watch.close()


class RunWatch:
    """A watch that reads run.json only after changes, and looks at the controller's process once a second."""

    def __init__(self, files: RunDir) -> None:
        self.record: RunRecord | None = None
        """The content of run.json; None until it can be read."""
        self.is_lost = False
        """Whether the controller is gone and recorded no end."""
        self._files = files
        self._seen: tuple[int, int] | None = None
        self._asked = time.monotonic()
        self._asked_slurm = -ASK_SLURM_S
        self._waits = True

    def is_over(self) -> bool:
        """Whether the run has ended, or its controller is gone."""
        self._read()
        if self.record is not None and self.record.waits:
            return not self._is_queued()
        if not self._has_ended and time.monotonic() - self._asked >= ASK_S:
            self._asked = time.monotonic()
            gone = self._is_gone()
            self._read()  # the run may have ended in the meantime
            self.is_lost = gone and not self._has_ended
        return self._has_ended or self.is_lost

    @property
    def _has_ended(self) -> bool:
        return self.record is not None and self.record.ended

    def _is_queued(self) -> bool:
        if time.monotonic() - self._asked_slurm >= ASK_SLURM_S:
            self._asked_slurm = time.monotonic()
            with contextlib.suppress(RunDirectoryError):
                record = read_record(self._files)
                self._waits = not record.waits or find_queued(record) is not None
        return self._waits

    def _read(self) -> None:
        with contextlib.suppress(OSError, RunDirectoryError):
            status = self._files.run.stat()
            if self._seen != (status.st_ino, status.st_mtime_ns):
                self.record = read_record(self._files)
                self._seen = status.st_ino, status.st_mtime_ns

    def _is_gone(self) -> bool:
        try:
            _, controller = self._files.read_run()
        except UsageError:  # the controller is on another machine; only its files are visible here
            return False
        except RunDirectoryError:
            return True
        return controller is None

    def exit_status(self) -> int | None:
        """The run's exit status; None if it is not known."""
        if self.record is not None and self.record.end.exit_status is not None:
            return self.record.end.exit_status
        with contextlib.suppress(RunDirectoryError):
            return summarize(self._files).exit_status
        return None


class FileWatch:
    """Waits for changes of files, and for new files with certain names in folders.

    It uses Linux's inotify, which Python's library lacks.

    Args:
        names: a new file matters if its name contains one of these.
    """

    def __init__(self, *names: str) -> None:
        self._names = [os.fsencode(name) for name in names]
        self._watched: set[Path] = set()
        self._woke = 0.0
        self._libc = ctypes.CDLL(None, use_errno=True)
        begin = getattr(self._libc, "inotify_init1", None)
        self._descriptor = -1 if begin is None else int(begin(_NON_BLOCKING))  # -1: none, or too many of the user's

    def add(self, paths: Iterable[Path]) -> bool:
        """Starts to watch files and folders; returns whether any is new and so may have changed already."""
        found = False
        for path in paths:
            if path not in self._watched and self._descriptor >= 0:
                mask = _CREATE | _MOVED_TO if path.is_dir() else _MODIFY
                if self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask) >= 0:
                    self._watched.add(path)
                    found = True
        return found

    def wait(self, readable: Collection[int] = (), until_closed: int | None = None) -> list[int]:
        """Waits for a change, at most for STAT_S; returns the descriptors that can be read.

        Raises:
            BrokenPipeError: the reader of `until_closed` is gone.
        """
        time.sleep(max(self._woke + PAUSE_S - time.monotonic(), 0.0))
        poll = select.poll()
        for descriptor in (self._descriptor, *readable):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        if until_closed is not None:
            poll.register(until_closed, 0)  # POLLERR alone
        until = time.monotonic() + STAT_S
        while True:
            ready = dict(poll.poll(max(until - time.monotonic(), 0.0) * 1000))
            if until_closed is not None and ready.get(until_closed, 0) & (select.POLLERR | select.POLLNVAL):
                raise BrokenPipeError
            found = [descriptor for descriptor in readable if descriptor in ready]
            if found or not ready or (self._descriptor in ready and self._take()):
                self._woke = time.monotonic()
                return found

    def _take(self) -> bool:
        """Takes the events; returns whether one of them matters."""
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:
            return True
        place, matters = 0, False
        while place < len(data):
            *_, length = _EVENT.unpack_from(data, place)
            name = data[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0")
            matters = matters or not name or any(part in name for part in self._names)
            place += _EVENT.size + length
        return matters

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
