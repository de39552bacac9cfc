"""Collects the Python stacks of running tasks without stopping the tasks, even if they are blocked in C++.

On a signal, faulthandler writes the stacks of a task, and of processes that the task has forked, to the task's file.
The agent sends it only to processes that have this file open: faulthandler writes to a descriptor by its number, which
belongs to another file in a program that has closed all descriptors it did not open. The agent reads the files when
none of them grows any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

from worker_entry.agent.tasks.activity import ActivityWatch
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.messages import CHILD, Stacks
from worker_entry.protocol.node_local import STACKS_SIGNAL
from worker_entry.protocol.values import Activity
from worker_entry.system import kernel
from worker_entry.system.kernel import Process

WAIT_S = 0.3
"""A file is complete when it has not grown for this time."""
NEXT_S = 0.05
"""How long most processes take to write their stacks."""
ROUNDS = 20
"""Rounds of signals to child processes; with more children than rounds, each round signals several children."""
LIMIT = 256 << 10


class StackDump:
    """Signals all processes and reads the stacks that they write."""

    def __init__(self) -> None:
        self._activity = ActivityWatch()
        self._files: dict[str, str] = {}
        self._paths: frozenset[str] = frozenset()
        """The files, without symbolic links."""
        self._rounds: list[list[int]] = []
        self._begins: list[dict[str, int]] = []
        """The sizes of the files when each round began."""
        self._sizes: dict[str, int] = {}
        self._due = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._files)

    def begin(self, tasks: Mapping[str, StartedTask], processes: Iterable[Process]) -> None:
        """Starts to signal the tasks' own processes, then all processes below them."""
        self._activity.begin(tasks)
        own = {task.pid for task in tasks.values() if task.running}
        children = [process.pid for process in processes if process.pid not in own]
        size = -(-len(children) // ROUNDS) or 1
        self._files = {name: task.stacks_file for name, task in tasks.items()}
        self._paths = frozenset(map(os.path.realpath, self._files.values()))
        self._rounds = [[*own], *(children[first : first + size] for first in range(0, len(children), size))]
        self._begins = []
        self._due = 0.0

    def poll(self, tasks: Mapping[str, StartedTask], now: float) -> Iterator[Stacks]:
        """Yields the answers once all are complete; `now` is in monotonic seconds."""
        self._activity.poll(tasks, now)
        texts = dict(self._collect(now))
        activity = self._activity.report(tasks) if texts else {}
        for task, text in texts.items():
            yield Stacks(task, text, activity.get(task, Activity()))

    def _collect(self, now: float) -> Iterator[tuple[str, str]]:
        """Yields each task's name and stacks once all are complete; the stacks of a task that wrote none are empty."""
        if not self.pending or now < self._due:
            return
        sizes = {file: _size(file) for file in self._files.values()}
        if self._rounds:
            # A task and its forked processes write to one file, so they must write in turn, or their stacks would mix.
            self._begins.append(sizes)
            for pid in self._rounds.pop(0):
                if self._can_write(pid):
                    with contextlib.suppress(OSError):  # the process has just ended
                        os.kill(pid, STACKS_SIGNAL)
            self._due = now + (NEXT_S if self._rounds else WAIT_S)
        elif sizes != self._sizes:
            self._sizes, self._due = sizes, now + WAIT_S
        else:
            files, self._files = self._files, {}
            for task, file in files.items():
                yield task, _read(file, [begin[file] for begin in self._begins])

    def _can_write(self, pid: int) -> bool:
        """Whether the process still has one of the files open."""
        if not kernel.LINUX:
            return True
        return not self._paths.isdisjoint(kernel.open_files(pid).values())


def _read(file: str, begins: list[int]) -> str:
    """Reads the output after the first of these sizes; at each of the other sizes, a child's output begins."""
    text = b""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        stream.seek(begins[0])
        text = stream.read(LIMIT)
    cuts = [size - begins[0] for size in begins]
    parts = [text[cut:end].decode(errors="replace") for cut, end in zip(cuts, [*cuts[1:], len(text)])]  # noqa: B905 - Python 3.9 has no `strict`
    return CHILD.join([parts[0], *filter(None, parts[1:])])


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
