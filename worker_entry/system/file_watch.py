"""What happens to the files of a folder, as the kernel's inotify tells it; Linux only."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

CLOSED_UNWRITTEN = 0x10
"""A file was closed that had been opened for reading only."""
MOVED_IN = 0x80
_OVERFLOW = 0x4000
_CLOEXEC, _NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_EVENT = struct.Struct("@iIII")
_PIECE = 64 << 10


class FolderWatch:
    """Remembers what happens from its construction on, up to some 16,000 events that are not taken.

    Raises:
        OSError: the folder cannot be watched.
    """

    def __init__(self, folder: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = _check(libc.inotify_init1(_CLOEXEC | _NONBLOCK))
        try:
            _check(libc.inotify_add_watch(self._descriptor, os.fsencode(folder), CLOSED_UNWRITTEN | MOVED_IN))
        except OSError:
            self.close()
            raise

    def take(self) -> Iterator[tuple[int, str]]:
        """What has happened since the last time: CLOSED_UNWRITTEN or MOVED_IN, and the file's name."""
        while True:
            try:
                data = os.read(self._descriptor, _PIECE)
            except BlockingIOError:
                return
            place = 0
            while place < len(data):
                _, kind, _, length = _EVENT.unpack_from(data, place)
                place += _EVENT.size + length
                if not kind & _OVERFLOW:
                    yield kind, os.fsdecode(data[place - length : place].rstrip(b"\0"))

    def close(self) -> None:
        os.close(self._descriptor)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
