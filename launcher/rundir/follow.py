"""Watches the files of a run for changes until the run is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.rundir.file_watch import FileWatch
from launcher.rundir.run_watch import RunWatch

NAMES = (".log", "attempt-", "run.json", "events.jsonl")
"""Parts of the names of new files that matter to a reader."""


class Look(NamedTuple):
    """One look. `over`: the run was over before it, so it is the last; `readable`: descriptors that can be read."""

    over: bool
    readable: Collection[int]


def looks(
    run: RunWatch,
    paths: Callable[[], Iterable[Path]],
    *,
    stdout: int | None = None,
    readable: Collection[int] = (),
) -> Iterator[Look]:
    """Yields at once, and then whenever one of the paths has changed or one of the descriptors can be read.

    Raises:
        BrokenPipeError: the reader of `stdout` is gone.
    """
    watch = FileWatch(*NAMES)
    found: Collection[int] = ()
    try:
        while True:
            over = run.is_over()  # asked before the caller reads: nothing is missed
            yield Look(over, found)
            if over:
                return
            found = ()
            if not watch.add(paths()):  # a new path may have changed since the caller's look
                found = watch.wait(readable, until_closed=stdout)
    finally:
        watch.close()
