"""Counts what tasks take from XLA's compile cache and add to it: TensorFlow does not report it, but the kernel does.

The entries of a folder are files. An entry that is opened for reading and closed was loaded; an entry that is moved to
its name was compiled. It counts once, however many tasks load it: the kernel may report several reads as one. What
another run does in the same folder on this machine counts as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Optional

from worker_entry.program.compile_cache import ENTRY, find_xla_folders
from worker_entry.protocol import environment
from worker_entry.protocol.kept import CacheUsed
from worker_entry.protocol.values import TaskStart
from worker_entry.system import kernel
from worker_entry.system.file_watch import CLOSED_UNWRITTEN, FolderWatch


class CacheWatch:
    """Counts for one attempt at a time."""

    def __init__(self) -> None:
        self._watches: dict[str, FolderWatch] = {}
        self._loaded: set[tuple[str, str]] = set()
        self._stored: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def starting(self, starts: Sequence[TaskStart]) -> Iterator[None]:
        """Continues to count once the tasks are started: until then, the agent itself reads the entries."""
        self._count()
        yield
        if kernel.LINUX:
            for root in {start.env[environment.CACHE] for start in starts if environment.CACHE in start.env}:
                for folder in find_xla_folders(root):
                    with contextlib.suppress(OSError):  # no more watches are allowed: then nothing is counted
                        if folder not in self._watches:
                            self._watches[folder] = FolderWatch(folder)
        for watch in self._watches.values():
            for _ in watch.take():
                pass

    def end(self, attempt: int) -> Optional[CacheUsed]:
        """What the attempt has used; None if it has no cache, or that is not known."""
        if not self._watches:
            return None
        self._count()
        used = CacheUsed(attempt, len(self._loaded), len(self._stored))
        self.close()
        return used

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches, self._loaded, self._stored = {}, set(), set()

    def _count(self) -> None:
        for folder, watch in self._watches.items():
            for kind, name in watch.take():
                if name.endswith(ENTRY):
                    (self._loaded if kind == CLOSED_UNWRITTEN else self._stored).add((folder, name))
