"""Finds holes in files: a program that truncates its log to a greater length leaves terabytes of zeros."""

from __future__ import annotations

import errno
import os


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
