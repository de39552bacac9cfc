"""One task's log as a reader sees it: whole lines in blocks, each with the moment when it was written."""

from __future__ import annotations

import errno
import os
import stat
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.tasks import TaskId
from worker_entry.protocol.log_index import RECORD, RESTART, SUFFIX, parse_index
from worker_entry.protocol.units import render_size
from worker_entry.system.file_holes import end_of_hole, is_zeros, last_data

PIECE = 256 << 10
"""Bytes per read."""
LONGEST = 1 << 20
"""Bytes of the longest line that is kept whole; longer lines are cut."""
HOLE = 64 << 10
"""Bytes of the shortest hole that is left out: a program that extends its log by truncation may leave terabytes."""


class Block(NamedTuple):
    """Whole lines of one task; `time`: Unix seconds, None if that is unknown."""

    time: float | None
    task: TaskId
    data: bytes


class LogFile:
    """The log of one task of one attempt, and how far it has been read.

    Raises:
        OSError: the log cannot be opened, or is not a regular file.
    """

    def __init__(self, task: TaskId, path: Path) -> None:
        self.task = task
        self.path = path
        self.position = 0
        """The offset of the next byte."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a FIFO
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise OSError(errno.EINVAL, "not a file", str(path))
        self._index_path = Path(f"{path}{SUFFIX}")
        self._indexed = 0
        """Bytes of the index that have been read."""
        self._offsets, self._micros = array("q"), array("q")
        self._partial = b""

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    # --- where to begin ---

    def skip_to_time(self, time: float) -> None:
        """Skips the lines that were finished before this moment."""
        self._read_index()
        if not self._offsets:  # a log of an older version
            if os.fstat(self._descriptor).st_mtime < time:
                self.position = self.size()
            return
        number = bisect_left(self._micros, int(time * 1e6))
        start = self._offsets[number - 1] if number else 0
        self.position = max(self.position, self._line_start(min(start, self.size())))

    def skip_to_tail(self, lines: int) -> None:
        """Skips everything except the last lines."""
        begin, end = last_data(self._descriptor)
        place, begin = end, max(begin, self.position)
        if lines == 0:
            self.position = max(self.size(), begin)
            return
        wanted = lines + (os.pread(self._descriptor, 1, end - 1) == b"\n" if end else 0)
        piece = PIECE >> 2
        while place > begin:
            start = max(begin, place - piece)
            data = os.pread(self._descriptor, place - start, start)
            found = data.count(b"\n")
            if found >= wanted:
                cut = len(data)
                for _ in range(wanted):
                    cut = data.rindex(b"\n", 0, cut)
                begin = start + cut + 1
                break
            wanted -= found
            place, piece = start, min(piece * 2, 4 << 20)
        self.position = begin

    def _line_start(self, place: int) -> int:
        """Returns the start of the line that contains this offset."""
        start = max(0, place - LONGEST)
        data = os.pread(self._descriptor, place - start, start)
        return start + data.rfind(b"\n") + 1 if b"\n" in data or not start else place

    # --- reading ---

    def blocks(self, now: float | None, *, timed: bool = True) -> Iterator[Block]:
        """Yields the lines up to the log's current end.

        Args:
            now: the time of lines that are not indexed yet; None: the time of the index's last record.
            timed: whether the blocks need their times.
        """
        status = os.fstat(self._descriptor)
        end = status.st_size
        if now is not None:
            now = min(now, status.st_mtime)
        if end < self.position:  # the program has truncated its log
            self.position, self._partial = 0, b""
        if end == self.position:
            return
        if timed:
            self._read_index()
        while self.position < end:
            data = os.pread(self._descriptor, min(PIECE, end - self.position), self.position)
            if not data:
                return
            if is_zeros(data):
                hole = end_of_hole(self._descriptor, self.position) - self.position
                if hole >= HOLE:
                    self.position += hole
                    yield Block(self._time_at(self.position, now), self.task, _render_hole(hole))
                    continue
            begin = self.position
            self.position += len(data)
            yield from self._cut(data, begin, now, timed=timed)

    def _cut(self, data: bytes, begin: int, now: float | None, *, timed: bool) -> Iterator[Block]:
        """Yields the piece's lines, cut where their times change."""
        done, number = 0, bisect_right(self._offsets, begin) if timed else len(self._offsets)
        while done < len(data):
            known = number < len(self._offsets)
            stop = max(min(self._offsets[number] - begin, len(data)), done) if known else len(data)
            end = data.rfind(b"\n", done, stop) + 1
            if end:
                time = self._micros[number] / 1e6 if known else self._time_at(begin + stop, now)
                yield Block(time, self.task, self._partial + data[done:end] if self._partial else data[done:end])
                self._partial, done = b"", end
            self._partial += data[done:stop]
            if len(self._partial) > LONGEST:
                time = self._time_at(begin + stop, now)
                yield Block(time, self.task, self._partial + b"\n")
                self._partial = b""
            done = stop
            number += 1

    def rest(self) -> Block | None:
        """The last line, if no line break ends it."""
        rest, self._partial = self._partial, b""
        self._read_index()
        return Block(self._time_at(self.position, None), self.task, rest + b"\n") if rest else None

    def unread(self) -> int:
        """The bytes of the last line that have been read but not yielded in a block."""
        return len(self._partial)

    def _time_at(self, place: int, now: float | None) -> float | None:
        """When the bytes before this offset had been written."""
        number = bisect_left(self._offsets, place)
        if number < len(self._offsets):
            return self._micros[number] / 1e6
        if now is not None:
            return now
        return self._micros[-1] / 1e6 if self._micros else None

    def _read_index(self) -> None:
        """Reads the new records of the index; an incomplete record may be completed later."""
        try:
            with self._index_path.open("rb") as file:
                file.seek(self._indexed)
                data = file.read()
        except OSError:
            return
        offsets, micros = parse_index(data)
        self._indexed += len(offsets) * RECORD.size
        for _ in range(offsets.count(RESTART)):  # records from before the log was cut no longer apply
            number = offsets.index(RESTART) + 1
            offsets, micros = offsets[number:], micros[number:]
            self._offsets, self._micros = array("q"), array("q")
        self._offsets.extend(offsets)
        self._micros.extend(micros)


def _render_hole(size: int) -> bytes:
    return f"({render_size(size)} of zeros left out)\n".encode()
