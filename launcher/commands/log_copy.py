"""Copies logs to our output, inside the kernel where possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select

from launcher.rundir.log_file import HOLE, LogFile
from worker_entry.system.file_holes import end_of_hole

PIECE = 1 << 20
PIPE = 1 << 20
"""The capacity of a pipe in bytes: the most that users may ask for, so that writer and reader seldom wait."""


def widen_pipe(output: int) -> None:
    """Enlarges the pipe's buffer if the output is a pipe and the system allows it."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE)


def copy_log(log: LogFile, output: int) -> int:
    """Writes the new part of the log; returns how many zeros were left out, which no program has written.

    Raises:
        OSError: the reader is gone, or the output's disk is full.
    """
    left_out, size = 0, log.size()
    if size < log.position:  # the program has truncated its log
        log.position = 0
    while log.position < size:
        data = end_of_hole(log.descriptor, log.position)
        if data - log.position >= HOLE:
            left_out += data - log.position
            log.position = data
            continue
        until = min(_end_of_data(log.descriptor, max(data, log.position), size), size)
        while log.position < until:
            copied = _copy(log, output, min(until - log.position, PIECE))
            if not copied:
                return left_out
            log.position += copied
    return left_out


def write_all(output: int, data: bytes) -> None:
    """Writes everything, even to a pipe or terminal that another program has made non-blocking.

    Raises:
        OSError: the reader is gone, or the output's disk is full.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(output, rest) :]
        except BlockingIOError:
            select.select([], [output], [])


def _copy(log: LogFile, output: int, count: int) -> int:
    try:
        return os.sendfile(output, log.descriptor, log.position, count)
    except BlockingIOError:
        select.select([], [output], [])
        return os.sendfile(output, log.descriptor, log.position, count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # a file opened with >>, for example
            raise
    data = os.pread(log.descriptor, count, log.position)
    write_all(output, data)
    return len(data)


def _end_of_data(descriptor: int, offset: int, size: int) -> int:
    """Returns the start of the next hole that is long enough to leave out; `size` if there is none."""
    try:
        hole = os.lseek(descriptor, offset, os.SEEK_HOLE)
        while hole < size and end_of_hole(descriptor, hole) - hole < HOLE:
            hole = os.lseek(descriptor, end_of_hole(descriptor, hole), os.SEEK_HOLE)
    except (OSError, AttributeError):
        return size
    return hole
