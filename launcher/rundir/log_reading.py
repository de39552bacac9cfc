"""Reads the logs of a run's tasks, merged in the order of their times, one attempt after the other."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.plan.paths import RunPaths
from launcher.rundir.log_file import Block, LogFile
from launcher.tasks import TaskId, TaskPattern, parse_task_id
from worker_entry.protocol.frozen import dataclass

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,9})")


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
