"""Writes the logs that agents send into the files of a run."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.log_index import SUFFIX, LogIndex, Mark
from worker_entry.protocol.messages import Log
from worker_entry.system import clock

OPEN_LOGS = 128
"""Mirrored logs that are open at once: a controller may be limited to 1,024 descriptors in all."""


class LogMirror:
    """Writes the log bytes that agents send into the run's files, each piece at its offset; called from any thread.

    `path_of` maps an attempt and a task's name to a file; it raises ValueError for an invalid name.
    """

    def __init__(self, path_of: Callable[[int, str], Path]) -> None:
        self._path_of = path_of
        self._lock = threading.Lock()
        self._files: dict[tuple[int, str], _MirroredFile] = {}
        self._open: OrderedDict[_MirroredFile, None] = OrderedDict()
        """Files with an open descriptor, except those being written now; the least recently used first."""
        self._attempt = 0
        self._closed = False

    def begin(self, attempt: int) -> None:
        """Closes the files of earlier attempts; later pieces of those are dropped."""
        self._end(lambda key: key[0] < attempt)
        self._attempt = attempt

    def write(self, frame: Log, data: bytes, clock_offset_s: float = 0.0) -> bool:
        """See FileSink; a piece that begins past the end of its log is a ProtocolError."""
        key = frame.attempt, frame.task
        with self._lock:
            if self._closed or frame.attempt < self._attempt:
                return False
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = _MirroredFile(self._path_of(*key))
        file.write(data, frame.offset)
        file.index(frame.marks, clock_offset_s)
        with self._lock:
            self._open[file] = None
            self._open.move_to_end(file)
            too_many = [self._open.popitem(last=False)[0] for _ in range(len(self._open) - OPEN_LOGS)]
        for other in too_many:
            other.close()
        return True

    def store(self, part: FileRead, data: bytes) -> None:
        """Drops a part: only logs are mirrored."""

    def close(self) -> None:
        self._closed = True
        self._end(lambda _: True)

    def _end(self, over: Callable[[tuple[int, str]], bool]) -> None:
        with self._lock:
            ended = [self._files.pop(key) for key in [*self._files] if over(key)]
            for file in ended:
                self._open.pop(file, None)
        for file in ended:
            file.end()


class _MirroredFile:
    """One log; opened on write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._index: LogIndex | None = None
        self._indexed = -math.inf
        """The node's time of the last mark; a piece that is sent again repeats its marks."""
        self._size = path.stat().st_size if path.exists() else 0  # what an earlier controller of the run has written
        self._ended = False

    def write(self, data: bytes, offset: int) -> None:
        with self._lock:
            if self._ended:
                return
            if offset > self._size:
                raise ProtocolError(f"a log piece at offset {offset:,} after {self._size:,} bytes")
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
            self._size = max(self._size, offset)

    def index(self, marks: Sequence[Mark], clock_offset_s: float) -> None:
        """Adds the marks, by our clock: none is in the future, whatever a node's clock says."""
        with self._lock:
            if self._ended or not marks:
                return
            if self._index is None:
                self._index = LogIndex(f"{self._path}{SUFFIX}")
            for mark in marks:
                if mark.time > self._indexed:
                    self._indexed = mark.time
                    self._index.note(mark.offset, min(mark.time - clock_offset_s, clock.now()))

    def close(self) -> None:
        """Closes the file until the next write."""
        with self._lock:
            self._close()

    def end(self) -> None:
        """Closes the file for good; later writes are dropped."""
        with self._lock:
            self._ended = True
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._index is not None:
            self._index.close()
            self._index = None
