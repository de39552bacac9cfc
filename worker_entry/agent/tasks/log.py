"""A task's log on this node: reads the log in pieces for sending, and indexes when it grew."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Union

from worker_entry.protocol.log_index import MARKS, SPACING_S, LogIndex, Mark
from worker_entry.system.files import FilePart, is_zeros, long_hole

PIECE = 256 << 10
"""How many bytes of a log are sent at once."""

LARGE = 64 << 10
"""Bytes; a piece that is at least this long is sent from the file without being read."""

Data = Union[bytes, FilePart]


class Piece(NamedTuple):
    """The next piece to send; `offset`: its place in the sent log. `hole`: the length of the hole skipped before it."""

    offset: int
    data: Data
    hole: int
    marks: list[Mark]


class TaskLog:
    """The log at `path`, its index at `index_path`, and the position up to which the log has been sent.

    `now`: returns Unix seconds, as Kernel.now does.
    """

    def __init__(self, path: str, index_path: str, now: Callable[[], float]) -> None:
        self._now = now
        self._descriptor = os.open(path, os.O_RDONLY)
        self._index = LogIndex(index_path)
        self._place = 0
        """The offset up to which the file has been read."""
        self._holes: list[tuple[int, int]] = []
        """For each skipped hole, the bytes sent before it, and the total length of all holes up to it."""
        self._next_mark = 0
        """The number of the first index record that has not been sent."""
        self._indexed = 0.0
        """When the last record was added."""
        self._observed = self._now()

    def observe(self, *, last: bool = False) -> None:
        """Indexes the log if it has grown; `last`: the log may not be observed again."""
        status = os.fstat(self._descriptor)
        now, observed = self._now(), self._observed
        self._observed = now
        if status.st_size == self._index.offset or (now < self._indexed + SPACING_S and not last):
            return
        # When the log was last written, if the file system uses our clock; in any case after the last observation.
        written = now - (time.time() - status.st_mtime)
        self._index.note(status.st_size, min(max(written, observed), now))
        self._indexed = now

    def read(self) -> Piece:
        """Returns the next piece, with empty data if the whole log has been read."""
        is_cut = self.unsent() < 0  # the program has truncated its own log, as `echo … > /dev/stderr` does
        if is_cut:
            self._place, self._holes = 0, []
        self.observe(last=is_cut or self._index.offset <= self._place)
        self._next_mark = max(self._next_mark, self._index.first)
        marks = self._read_marks()
        limit = marks[-1].offset - self._place if len(marks) == MARKS else PIECE
        data, hole = self._next_data(limit), 0
        if isinstance(data, bytes) and is_zeros(data) and (hole := long_hole(self._descriptor, self._place)):
            self._holes.append((self._place - self._left_out, self._left_out + hole))
            self._place += hole
            data = self._next_data(limit)
        offset = self._place - self._left_out
        self._place += len(data)
        marks = [mark for mark in marks if mark.offset <= self._place]
        self._next_mark += len(marks)
        sent = [Mark(max(mark.offset - self._left_out, 0), mark.time) for mark in marks]
        return Piece(offset, data, hole, sent)

    def _next_data(self, limit: int) -> Data:
        """Returns bytes that are already indexed, so that the piece has the mark of its last line."""
        length = max(min(limit, self._index.offset - self._place), 0)
        if length >= LARGE and os.pread(self._descriptor, 1, self._place) not in (b"", b"\0"):
            return FilePart(self._descriptor, self._place, length)
        return os.pread(self._descriptor, length, self._place)

    def _read_marks(self) -> list[Mark]:
        """Returns the marks that the next piece may have."""
        if self._next_mark >= self._index.count:
            return []
        try:
            marks = self._index.read(self._next_mark, MARKS)
        except OSError:
            return []
        return [mark for mark in marks if mark.offset <= self._place + PIECE]

    @property
    def _left_out(self) -> int:
        return self._holes[-1][1] if self._holes else 0

    def rewind(self, offset: int) -> None:
        """Reads again from this offset: the bytes that were sent after it got lost."""
        if offset < self._place - self._left_out:
            while self._holes and self._holes[-1][0] > offset:
                self._holes.pop()
            self._place = offset + self._left_out
            with contextlib.suppress(OSError):
                self._next_mark = self._index.find(self._place)

    def unsent(self) -> int:
        return self.size() - self._place

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        self.observe(last=True)
        self._index.close()
        os.close(self._descriptor)
