"""The Python stacks of running tasks, also of those that are blocked in C++, without stopping them.

A task has faulthandler write them to a file of its own on a signal that every other process ignores, so that it can be
sent to all that runs below a task. What faulthandler writes is read when the file has stopped growing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from worker_entry.kernel import Process
from worker_entry.messages import Stacks
from worker_entry.telling import STACKS_SIGNAL

WAIT_S = 0.3
"""Without a new line for so long, a file is complete."""
LIMIT = 256 << 10


class StackDump:
    """An agent's part: asks all processes, and reads what they have written."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._begins: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._due = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._files)

    def begin(self, files: dict[str, str], processes: Iterable[Process], now: float) -> None:
        """Asks the processes; `files` are those of the tasks, by their names."""
        self._files = dict(files)
        self._begins = {task: _size(file) for task, file in files.items()}
        self._sizes = dict(self._begins)
        self._due = now + WAIT_S
        for process in processes:
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(process.pid, STACKS_SIGNAL)

    def collect(self, now: float) -> Iterator[Stacks]:
        """The stacks of all tasks, once they are complete; those that have written nothing have none."""
        if not self.pending or now < self._due:
            return
        sizes = {task: _size(file) for task, file in self._files.items()}
        if sizes != self._sizes:
            self._sizes, self._due = sizes, now + WAIT_S
            return
        files, self._files = self._files, {}
        for task, file in files.items():
            text = b""
            with contextlib.suppress(OSError), open(file, "rb") as stream:
                stream.seek(self._begins[task])
                text = stream.read(LIMIT)
            yield Stacks(task, text.decode(errors="replace"))


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
