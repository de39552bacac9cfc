"""Counts the compile cache entries that tasks load and add: the libraries do not report it, but the kernel does.

An entry that is read was loaded; an entry that is new was compiled. It counts once, however many tasks load it: the
kernel may report several reads as one. What another run does in the same folder on this machine counts as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Optional

from worker_entry.program.compile_cache import find_entries, find_folders
from worker_entry.protocol import environment
from worker_entry.protocol.kept import CacheUsed
from worker_entry.protocol.values import TaskStart
from worker_entry.system import kernel
from worker_entry.system.file_watch import READ, FolderWatch


class CacheWatch:
    """Counts for one attempt at a time."""

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
        if kernel.LINUX and caches:
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
