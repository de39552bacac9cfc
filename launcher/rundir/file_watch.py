"""Waits for changes of files without polling: uses Linux's inotify, which Python's library lacks."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Collection, Iterable
from pathlib import Path

STAT_S = 1.0
"""How often the caller checks the files anyway: inotify does not see writes from other machines."""
PAUSE_S = 0.05
"""The least time between two wake-ups, for programs that print all the time."""

_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_EVENT = struct.Struct("iIII")
_NON_BLOCKING = os.O_NONBLOCK | os.O_CLOEXEC


class FileWatch:
    """Waits for changes of files, and for new files with certain names in folders.

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
