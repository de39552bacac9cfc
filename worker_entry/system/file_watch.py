"""Watches the files and folders in some folders with the kernel's inotify; Linux only."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

READ = 0x10
"""A file that had been opened for reading only was closed."""
_MOVED_IN, _CREATED = 0x80, 0x100
ADDED = _MOVED_IN | _CREATED
_OF_FOLDER = 0x4000_0000
_CLOEXEC, _NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_EVENT = struct.Struct("@iIII")
_PIECE = 64 << 10


class FolderWatch:
    """Records events in the folders that are added; the kernel keeps some 16,000 events until `take` is called.

    Raises:
        OSError: the system allows no more watches.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = _check(self._libc.inotify_init1(_CLOEXEC | _NONBLOCK))
        self._folders: dict[int, str] = {}

    def add(self, folder: str) -> None:
        """Watches one more folder, without the folders in it.

        Raises:
            OSError: the folder cannot be watched.
        """
        number = _check(self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), READ | ADDED))
        self._folders[number] = folder

    def take(self) -> Iterator[tuple[int, str]]:
        """Yields the events since the last call: a bit of READ or ADDED, and the path."""
        while True:
            try:
                data = os.read(self._descriptor, _PIECE)
            except BlockingIOError:
                return
            place = 0
            while place < len(data):
                number, kind, _, length = _EVENT.unpack_from(data, place)
                place += _EVENT.size + length
                # Skips listed folders, and events that were not requested: events were lost, or a folder was removed.
                if kind & ADDED or (kind & READ and not kind & _OF_FOLDER):
                    name = os.fsdecode(data[place - length : place].rstrip(b"\0"))
                    yield kind, os.path.join(self._folders[number], name)

    def close(self) -> None:
        os.close(self._descriptor)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
