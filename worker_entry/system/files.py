"""Parts of files: sends them without copying them through this process's memory, and finds their holes.

A program that truncates its log to a greater length leaves terabytes of zeros.
"""

from __future__ import annotations

import errno
import os

COPIED = 64 << 10
"""How many bytes are copied at once if the kernel does not send the file itself."""


class FilePart:
    """`length` bytes of an open file from `offset`; its own descriptor stays open until `close`.

    If the file is truncated meanwhile, zeros replace the missing bytes: the receiver already expects `length` bytes.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._offset = offset
        self._length = length

    def __len__(self) -> int:
        """The number of bytes that have not been sent."""
        return self._length

    def __bytes__(self) -> bytes:
        return self._read(self._length)

    def send(self, target: int) -> int:
        """Sends as many bytes as `target` accepts; returns how many.

        Raises:
            OSError: as `os.write` does.
        """
        try:
            sent = os.sendfile(target, self._descriptor, self._offset, self._length)
        except BlockingIOError:
            raise
        except OSError:  # the kernel cannot send from this file to this target; any other failure recurs in `write`
            sent = 0
        if not sent:
            sent = os.write(target, self._read(COPIED))
        self._offset += sent
        self._length -= sent
        return sent

    def _read(self, limit: int) -> bytes:
        length = min(self._length, limit)
        return os.pread(self._descriptor, length, self._offset).ljust(length, b"\0")

    def close(self) -> None:
        os.close(self._descriptor)


def end_of_hole(descriptor: int, offset: int) -> int:
    """Where data begins at or after the offset: the file's end if no data follow, the offset itself if unknown.

    Moves the descriptor's position.
    """
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return max(os.fstat(descriptor).st_size, offset) if error.errno == errno.ENXIO else offset
    except AttributeError:  # the system has no SEEK_DATA
        return offset


HOLE = 64 << 10
"""Bytes of the shortest hole in a log that readers skip: a program that extends its log by truncation may leave
terabytes."""


def long_hole(descriptor: int, offset: int) -> int:
    """The length of the hole that begins here; 0 if it is too short to be skipped."""
    length = end_of_hole(descriptor, offset) - offset
    return length if length >= HOLE else 0


def last_data(descriptor: int, extents: int = 1000) -> tuple[int, int]:
    """Where the last data of a file begin and end; examines at most `extents` extents."""
    size = os.fstat(descriptor).st_size
    begin, end = 0, size
    try:
        place = os.lseek(descriptor, 0, os.SEEK_DATA)
        for _ in range(extents):
            begin, end = place, os.lseek(descriptor, place, os.SEEK_HOLE)
            place = os.lseek(descriptor, end, os.SEEK_DATA)
    except OSError as error:
        return (begin, end) if error.errno == errno.ENXIO else (0, size)
    except AttributeError:
        pass
    return 0, size


def is_zeros(data: bytes) -> bool:
    """Whether the data are all zeros, as from a hole."""
    return data[:1] == b"\0" and not data.strip(b"\0")
