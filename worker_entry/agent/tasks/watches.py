"""Watches the ports, checkpoints and compile cache entries of running tasks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional, Union

from worker_entry.agent.tasks.task import StartedTask
from worker_entry.agent.tasks.tree import Tree
from worker_entry.program.compile_cache import find_entries, find_folders
from worker_entry.protocol import environment, orders
from worker_entry.protocol.messages import CacheUsed, Halted, InterruptTaken, Listening, Returned, Saved, Status
from worker_entry.protocol.values import TaskStart
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.file_watch import READ, FolderWatch
from worker_entry.system.kernel import LINUX
from worker_entry.system.ports import HeldPorts

STATUS_S = 0.5
"""How often status files are read once the cluster is up."""
LOOK_S = 2.0
QUIET_S = 0.5
"""An entry that has not changed for this time is complete. Without this rule, no checkpoint of a program that saves
more often than we look would be reported."""
_Entry = tuple[int, str]
"""When an entry of the directory was changed, in nanoseconds, and its name."""


class TaskWatch:
    """Polls the tasks of an agent: the ports that they open, signals that suspend them, and their status files."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._due = 0.0

    def poll(
        self, tasks: Mapping[str, StartedTask], ports: HeldPorts, tree: Tree, now: float
    ) -> Iterator[Union[Listening, Halted, Status, Returned, InterruptTaken]]:
        """Yields the changes since the last call; `now` is in monotonic seconds."""
        halts, tree.halts = tree.halts, []
        by_pid = {task.pid: task for task in tasks.values() if task.running}
        for pid, signum in halts:
            if pid in by_pid:
                by_pid[pid].halted = halted = Halted(by_pid[pid].name, signum, self._kernel.now())
                yield halted
        for name in ports.newly_open(now):
            yield Listening(name, self._kernel.now())
        if ports.forming or now >= self._due:
            self._due = now + STATUS_S
            for task in tasks.values():
                yield from task.new_status()
                if task.running:
                    if tree.interrupts:
                        yield from task.new_interrupt()
                    yield from task.new_return()


class CheckpointWatch:
    """Reports the newest entry of the directory once it is complete: older than QUIET_S, or unchanged in two checks.

    The second criterion is for a file server whose clock is ahead of ours.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._directory = ""
        self._due = 0.0
        self._last: Optional[_Entry] = None
        self._reported: Optional[_Entry] = None

    def begin(self, directory: str) -> None:
        """Watches this directory for new entries from now on; an empty path means none."""
        self._directory = directory
        self._last = self._reported = _find_newest(directory)

    def poll(self, now: float) -> Optional[Saved]:
        """What was saved since the last call; `now` is in monotonic seconds."""
        if not self._directory or now < self._due:
            return None
        self._due = now + LOOK_S
        before, self._last = self._last, _find_newest(self._directory)
        if self._last is None or self._last == self._reported:
            return None
        is_quiet = self._kernel.now() - self._last[0] / 1e9 >= QUIET_S
        return self._report(self._last) if is_quiet or self._last == before else None

    def end(self) -> Optional[Saved]:
        """What was saved since the last call; stops watching, because no task writes there any more."""
        directory, self._directory = self._directory, ""
        newest = _find_newest(directory)
        return self._report(newest) if newest is not None and newest != self._reported else None

    def _report(self, entry: _Entry) -> Saved:
        self._reported = entry
        changed, name = entry
        return Saved(name[:200], changed / 1e9)


def _find_newest(directory: str) -> Optional[_Entry]:
    newest: Optional[_Entry] = None
    if directory:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone again
                    found = entry.stat().st_mtime_ns, entry.name
                    newest = found if newest is None else max(newest, found)
    return newest


def find_checkpoints(order: orders.Start, cwd: str) -> str:
    """The tasks' checkpoint directory; empty if they have none."""
    directory = next((start.env.get(environment.CHECKPOINT_DIR, "") for start in order.tasks), "")
    return os.path.join(cwd, os.path.expanduser(directory)) if directory else ""


class CacheWatch:
    """Counts the compile cache entries that tasks load and add, for one attempt at a time.

    Libraries do not report this, but the kernel does: an entry that is read was loaded, and an entry that is new was
    compiled. An entry counts once, however many tasks load it: the kernel may report several reads as one. Entries that
    another run uses in the same folder on this machine count as well.
    """

    def __init__(self) -> None:
        self._watch: Optional[FolderWatch] = None
        self._caches: set[str] = set()
        self._loaded: set[str] = set()
        self._stored: set[str] = set()

    @contextlib.contextmanager
    def starting(self, starts: Sequence[TaskStart]) -> Iterator[None]:
        """Continues to count once the tasks are started: until then, the agent itself reads the entries."""
        self._count()
        yield
        caches = {start.env[environment.CACHE] for start in starts if environment.CACHE in start.env} - self._caches
        if LINUX and caches:
            try:
                self._watch = self._watch or FolderWatch()
                for folder in (folder for cache in caches for folder in find_folders(cache)):
                    self._watch.add(folder)
            except OSError:  # no more watches are allowed: then nothing is counted
                self.close()
            self._caches |= caches
        if self._watch is not None:
            for _ in self._watch.take():
                pass

    def end(self, attempt: int) -> Optional[CacheUsed]:
        """Returns the attempt's counts; None if it has no cache, or they are not known."""
        if self._watch is None:
            return None
        self._count()
        used = CacheUsed(attempt, len(self._loaded), len(self._stored))
        self.close()
        return used

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch, self._caches, self._loaded, self._stored = None, set(), set(), set()

    def _count(self) -> None:
        if self._watch is not None:
            for kind, path in self._watch.take():
                (self._loaded if kind & READ else self._stored).update(find_entries(path))
