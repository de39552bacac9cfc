"""Shows the logs of a run's tasks; with `follow`, while the run is running."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from launcher.console.log_output import LogOutput
from launcher.errors import UsageError
from launcher.plan.paths import RunPaths
from launcher.report.journal_line import Line, Message
from launcher.rundir.directory import RunDir
from launcher.rundir.follow import RunWatch, wait_for_changes
from launcher.rundir.journal_reading import JournalReader
from launcher.rundir.logs import Block, LogChoice, LogFile, LogReader, find_attempts, find_logs
from launcher.tasks import TaskId, name_tasks
from worker_entry.system.files import end_of_hole, long_hole

TOGETHER = 32 << 10
"""Bytes from which on lines are rendered and written; a piece that is read has more, and is not joined with others."""
PIECE = 1 << 20
PIPE = 1 << 20
"""The capacity of a pipe in bytes: the most that users may ask for, so that writer and reader seldom wait."""


def find_tasks(files: RunPaths, choice: LogChoice, expected: Sequence[TaskId] = ()) -> list[TaskId]:
    """The tasks whose logs a choice selects; empty if there are no logs yet. Tasks in `expected` may still get a log.

    Raises:
        UsageError: there is no such attempt, or no such task.
    """
    attempts = find_attempts(files)
    if choice.attempt is not None and choice.attempt not in attempts:
        last = f"the last one is {attempts[-1]}" if attempts else "none has begun"
        raise UsageError(f"this run has no attempt {choice.attempt}: {last}")
    found = find_logs(files.attempt(choice.attempt or attempts[-1])) if attempts else {}
    for pattern in choice.patterns:
        if found and not any(pattern.matches(task) for task in (*found, *expected)):
            raise UsageError(f"this run has no log of {pattern}", hint=f"it has logs of {name_tasks(found)}")
    return [task for task in found if choice.has(task)]


def show_logs(files: RunDir, choice: LogChoice, output: LogOutput, *, follow: bool, stdout: int) -> None:
    """Writes the logs; with `follow`, until the run is over.

    Raises:
        OSError: the reader is gone, or the output cannot be written.
    """
    reader = LogReader(files, choice)
    widen_pipe(stdout)

    def write(blocks: Iterable[Block]) -> None:
        rendered, size = [], 0
        for block in blocks if choice.timed else _join(blocks):
            text = output.render(*block)
            rendered.append(text)
            size += len(text)
            if size >= TOGETHER:
                write_all(stdout, b"".join(rendered))
                rendered, size = [], 0
        write_all(stdout, b"".join(rendered))

    for over in _looks(files, lambda: reader.paths, follow=follow, stdout=stdout):
        now = None if over else time.time()
        write(reader.read(now))
        while follow and reader.is_behind():
            write(reader.advance())
            write(reader.read(now))
        if over or reader.is_over():
            break
    write(reader.read(None))


def copy_logs(files: RunDir, choice: LogChoice, *, follow: bool, stdout: int) -> int:
    """Writes the log of one task unchanged, including its unfinished line; with `follow`, until the run is over.

    Returns how many zeros were left out: holes in the file, which no program has written.

    Raises:
        OSError: the reader is gone, or the output cannot be written.
    """
    reader, left_out = LogReader(files, choice), 0
    widen_pipe(stdout)
    for over in _looks(files, lambda: reader.paths, follow=follow, stdout=stdout):
        while True:
            reader.find()
            behind = follow and reader.is_behind()  # asked before reading: nothing is missed
            left_out += sum([copy_log(log, stdout) for log in reader.logs.values()])
            if not behind:
                break
            reader.next_attempt()
        if over or reader.is_over():
            break
    return left_out


def show_own(files: RunDir, choice: LogChoice, output: LogOutput, *, follow: bool, stdout: int) -> None:
    """Writes the messages of distlaunch itself; with `follow`, until the run is over.

    Raises:
        OSError: the reader is gone, or the output cannot be written.
    """
    journal, tail = JournalReader(files.events), choice.tail
    for _ in _looks(files, lambda: [files.root, files.events], follow=follow, stdout=stdout):
        messages = [*_choose_messages(journal.read(), choice)][: choice.head]
        if tail is not None:
            messages, tail = messages[max(len(messages) - tail, 0) :], None
        rendered = [output.render_own(moment, message.level, message.text) for moment, message in messages]
        write_all(stdout, b"".join(rendered))


def _looks(files: RunDir, paths: Callable[[], Iterable[Path]], *, follow: bool, stdout: int) -> Iterator[bool]:
    """Yields immediately and, with `follow`, after every change; the value is True the last time."""
    if not follow:
        yield True
        return
    for wakeup in wait_for_changes(RunWatch(files), paths, stdout=stdout):
        yield wakeup.over


def _join(blocks: Iterable[Block]) -> Iterator[Block]:
    """Joins consecutive blocks of one task, if their times are not shown."""
    task: TaskId | None = None
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        if parts and (block.task != task or size >= TOGETHER):
            assert task is not None
            yield Block(None, task, b"".join(parts))
            parts, size = [], 0
        task = block.task
        parts.append(block.data)
        size += len(block.data)
    if task is not None and parts:
        yield Block(None, task, b"".join(parts))


def _choose_messages(lines: Iterable[Line], choice: LogChoice) -> Iterator[tuple[float, Message]]:
    for line in lines:
        is_chosen = choice.attempt in (None, line.attempt) and (choice.since is None or line.time >= choice.since)
        if is_chosen and (message := line.message) is not None:
            yield line.time, message


def widen_pipe(output: int) -> None:
    """Enlarges the pipe's buffer if the output is a pipe and the system allows it."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE)


def copy_log(log: LogFile, output: int) -> int:
    """Writes the new part of the log, inside the kernel where possible.

    Returns how many zeros were left out, which no program has written.

    Raises:
        OSError: the reader is gone, or the output's disk is full.
    """
    left_out, size = 0, log.size()
    if size < log.position:  # the program has truncated its log
        log.position = 0
    while log.position < size:
        if hole := long_hole(log.descriptor, log.position):
            left_out += hole
            log.position += hole
            continue
        until = min(_end_of_data(log.descriptor, log.position, size), size)
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
        while hole < size and not long_hole(descriptor, hole):
            hole = os.lseek(descriptor, end_of_hole(descriptor, hole), os.SEEK_HOLE)
    except (OSError, AttributeError):
        return size
    return hole
