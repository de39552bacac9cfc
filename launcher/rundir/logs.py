"""Reads the logs of a run's tasks, merged in the order of their times, one attempt after the other."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import stat
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launcher.plan.paths import RunPaths
from launcher.tasks import TaskId, TaskPattern, parse_task_id
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.log_index import RECORD, RESTART, SUFFIX, parse_index
from worker_entry.protocol.units import render_size
from worker_entry.system.files import is_zeros, last_data, long_hole

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,9})")
PIECE = 64 << 10
"""Bytes per read. With labels, they take less than 128 KiB, above which malloc maps new memory for each piece."""
LONGEST = 1 << 20
"""Bytes of the longest line that is kept whole; longer lines are cut."""


@dataclass(frozen=True, kw_only=True)
class LogChoice:
    """The choice of lines to read. `attempt` of None: the last attempt, and later ones as they start."""

    patterns: Sequence[TaskPattern] = ()
    """The tasks; if empty, all except auxiliary tasks."""
    attempt: int | None = None
    tail: int | None = None
    """The last lines of each task only."""
    head: int | None = None
    """The first lines of each task only."""
    since: float | None = None
    """Only lines since this moment, in Unix seconds."""
    timed: bool = True
    """Whether blocks need their times, even where only one task is read."""

    def has(self, task: TaskId) -> bool:
        if not self.patterns:
            return not task.is_auxiliary
        return any(pattern.matches(task) for pattern in self.patterns)


def find_attempts(files: RunPaths) -> list[int]:
    """The attempts that have a folder, in order."""
    try:
        names = [path.name for path in files.root.iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _ATTEMPT.fullmatch(name)))


def find_logs(folder: Path) -> dict[TaskId, Path]:
    """The logs in an attempt's folder, in the order of their tasks."""
    found = {}
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".log"]
    except OSError:
        return {}
    for path in paths:
        with contextlib.suppress(ValueError):
            task = parse_task_id(path.stem.replace("-", ":", 1))
            if task.file_name == path.stem:
                found[task] = path
    return dict(sorted(found.items()))


class LogReader:
    """A reader of the chosen lines. Each `read` begins where the last `read` ended."""

    def __init__(self, files: RunPaths, choice: LogChoice) -> None:
        self.attempt = choice.attempt or 0
        """The attempt that is read; 0 while there is none."""
        self.logs: dict[TaskId, LogFile] = {}
        """The logs that are read."""
        self._files = files
        self._choice = choice
        self._folder_changed = 0
        self._left: dict[TaskId, int] = {}
        """How many more lines of each task to read, if limited."""
        self._is_first = True

    @property
    def folder(self) -> Path:
        """Where the logs of the attempt are."""
        return self._files.attempt(self.attempt)

    def find(self) -> None:
        """Opens the new logs of this attempt, each at its first chosen line."""
        if not self.attempt:
            self.attempt = max(find_attempts(self._files), default=0)
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            return
        if changed == self._folder_changed:
            return
        self._folder_changed = changed
        for task, path in find_logs(self.folder).items():
            if task in self.logs or not self._choice.has(task):
                continue
            try:
                log = self.logs[task] = LogFile(task, path)
            except OSError:
                continue
            self._begin(log)

    def _begin(self, log: LogFile) -> None:
        choice = self._choice
        if choice.head is not None:
            self._left[log.task] = choice.head
        if self._is_first and choice.since is not None:
            log.skip_to_time(choice.since)
        if self._is_first and choice.tail is not None:
            log.skip_to_tail(choice.tail)

    def read(self, now: float | None) -> Iterator[Block]:
        """Yields the new lines of all logs.

        `now`: the time of lines that are not indexed yet. None: the logs are complete, so that the last line of a log
        needs no line break.
        """
        self.find()
        logs = [self.logs[task] for task in sorted(self.logs)]
        timed = self._choice.timed or len(logs) > 1
        yield from heapq.merge(*(self._limit(_read(log, now, timed=timed)) for log in logs), key=_order)
        self._is_first = self._is_first and not logs

    def is_behind(self) -> bool:
        """Whether a later attempt has begun, so that all processes of this attempt are gone."""
        return self._choice.attempt is None and max(find_attempts(self._files), default=0) > self.attempt

    def advance(self) -> Iterator[Block]:
        """Yields the rest of this attempt, then moves to the next one."""
        yield from self.read(None)
        self.next_attempt()

    def next_attempt(self) -> None:
        """Moves to the next attempt, which is read completely."""
        self.close()
        following = [number for number in find_attempts(self._files) if number > self.attempt]
        if following:
            self.attempt = following[0]
        self._is_first = False

    def is_over(self) -> bool:
        """Whether the chosen attempt is the only one and has ended, because a later one has begun."""
        return self._choice.attempt is not None and max(find_attempts(self._files), default=0) > self.attempt

    @property
    def paths(self) -> list[Path]:
        """The files and folders whose changes matter."""
        return [self._files.root, *([self.folder] if self.attempt else []), *(log.path for log in self.logs.values())]

    def close(self) -> None:
        for log in self.logs.values():
            log.close()
        self.logs.clear()
        self._folder_changed = 0

    def _limit(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            left = self._left.get(block.task)
            if left is None:
                yield block
                continue
            lines = block.data.count(b"\n")
            self._left[block.task] = max(left - lines, 0)
            if lines <= left and left:
                yield block
            elif left:
                yield block._replace(data=b"".join(block.data.splitlines(keepends=True)[:left]))
            if lines >= left:
                return


def _read(log: LogFile, now: float | None, *, timed: bool) -> Iterator[Block]:
    yield from log.blocks(now, timed=timed)
    rest = log.rest() if now is None else None
    if rest is not None:
        yield rest


def _order(block: Block) -> float:
    return block.time if block.time is not None else 0.0


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
            if is_zeros(data) and (hole := long_hole(self._descriptor, self.position)):
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
