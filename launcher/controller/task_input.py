"""Passes distlaunch's own stdin, if it is a pipe or a file, on to the tasks.

The input is kept in the run's folder, because a restarted task and a resumed run read it from the beginning. Only a
little is read ahead of the tasks: `yes | distlaunch …` must not fill the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from launcher.plan.paths import RunPaths
from worker_entry.protocol.messages import AskInput
from worker_entry.protocol.orders import Input

PART_BYTES = 64 << 10
AHEAD_BYTES = 1 << 20
"""How much is read ahead of the task that has read most."""


class InputArrived:
    """More input is available, or the input has ended."""


class Reply(NamedTuple):
    node: str
    part: Input
    body: bytes


def take_stdin() -> int | None:
    """A descriptor of our own stdin, if tasks may read it: a pipe, a socket or a file, but never a terminal."""
    try:
        kind = os.fstat(0).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind):
            return os.dup(0)
    except OSError:  # it is closed
        pass
    return None


def open_input(
    files: RunPaths, source: int | None, wake: Callable[[InputArrived], None], warn: Callable[[str], None]
) -> TaskInput | None:
    """The input of a run's tasks; None if there is none, not even from an earlier controller. See TaskInput."""
    if source is None and not files.stdin.exists() and not files.partial_stdin.exists():
        return None
    return TaskInput(files, source, wake, warn)


class TaskInput:
    """The input of a run's tasks.

    Args:
        files: the run's folder.
        source: the descriptor to read, which this object closes; None: an earlier controller has read it into the
            folder.
        wake: called from another thread when `arrived` may have replies.
        warn: called from another thread with a message to the user.
    """

    def __init__(
        self, files: RunPaths, source: int | None, wake: Callable[[InputArrived], None], warn: Callable[[str], None]
    ) -> None:
        self._wake = wake
        self._warn = warn
        self._changed = threading.Condition()
        self._asked = 0
        """The furthest offset to which a task has read."""
        self._waiting: dict[tuple[str, str], AskInput] = {}
        """The requests that cannot be answered yet, by node and task."""
        self._files = files
        path = files.stdin if source is None and files.stdin.exists() else files.partial_stdin
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        self._ended = source is None
        if source is not None:
            threading.Thread(target=self._read, args=(source,), name="stdin", daemon=True).start()
        elif path == files.partial_stdin:
            warn("the last controller has not read all of its stdin; for the tasks, it ends early")

    def answer(self, node: str, ask: AskInput) -> Iterator[Reply]:
        """Yields the reply, unless it has to wait."""
        with self._changed:
            self._asked = max(self._asked, min(ask.offset, self._size))
            self._changed.notify_all()
            data = os.pread(self._file, PART_BYTES, ask.offset) if ask.offset < self._size else b""
            last = self._ended and ask.offset + len(data) >= self._size
            if not data and not last:
                self._waiting[node, ask.task] = ask
                return
        yield Reply(node, Input(ask.task, ask.offset, len(data), last), data)

    def arrived(self) -> Iterator[Reply]:
        """Yields the replies that had to wait for more input."""
        with self._changed:
            waiting, self._waiting = self._waiting, {}
        for (node, _), ask in waiting.items():
            yield from self.answer(node, ask)

    def _read(self, source: int) -> None:
        os.set_blocking(source, True)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._size < self._asked + AHEAD_BYTES)
                data = os.read(source, PART_BYTES)
                if not data:
                    self._files.partial_stdin.rename(self._files.stdin)
                    return
                with self._changed:
                    while data:
                        written = os.pwrite(self._file, data, self._size)
                        self._size, data = self._size + written, data[written:]
                    is_awaited = bool(self._waiting)
                if is_awaited:
                    self._wake(InputArrived())
        except OSError as error:
            self._warn(f"stdin ends here for the tasks: {error.strerror}")
        finally:
            with contextlib.suppress(OSError):
                os.close(source)
            with self._changed:
                self._ended = True
            self._wake(InputArrived())
