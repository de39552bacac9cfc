"""An independent witness of processes: psutil, not distlaunch, looks for a mark in their environments."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import time
import uuid
from collections.abc import Callable, Collection, Iterator

import psutil

from tests.harness.polling import HANG_S, eventually
from tests.harness.processes.warm_python import find_kept
from tests.harness.rules.second_chance import NoSecondChanceError

MARK = "DISTLAUNCH_TEST_MARK"


def make_mark() -> dict[str, str]:
    """An environment that marks every process that a test starts, directly or not."""
    return {MARK: uuid.uuid4().hex}


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """The living processes (zombies left out) with the mark."""
    return list(_find(mark[MARK]))


def _find(value: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def assert_none_left(mark: dict[str, str], spare: Collection[int] = ()) -> None:
    """Fails without a second chance if a process with the mark is alive; `spare`: pids that may be alive.

    A forkserver that the tests keep for later runs may be alive, too: it has the mark of the run that has restarted it.
    """
    kept = {*spare, *find_kept()}
    left = [process for process in marked(mark) if process.pid not in kept]
    if left:
        raise NoSecondChanceError("processes are left behind:\n" + "\n".join(map(_describe, left)))


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        with process.oneshot():
            age_s = time.time() - process.create_time()
            return (
                f"{process.pid}, child of {process.ppid()}, {process.status()}, started {age_s:.1f} s ago: "
                f"{shlex.join(process.cmdline())}"
            )
    return f"{process.pid}, which has ended since"


def await_none_left(mark: dict[str, str], timeout_s: float = HANG_S, spare: Collection[int] = ()) -> None:
    """Waits until no process with the mark is alive; fails as `assert_none_left` does if one stays."""
    eventually(lambda: assert_none_left(mark, spare), timeout_s)


def open_descriptors() -> set[str]:
    """This process's open descriptors, without those that an earlier test has left to the garbage collector.

    A thread of an earlier test may still close some, so compare by `<=`, which finds all new ones.
    """
    gc.collect()
    return set(os.listdir("/dev/fd"))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
    """Polls until the condition holds; fails the test if it does not in time."""

    def check() -> None:
        assert condition(), f"not within {timeout_s:g} s: {what}"

    eventually(check, timeout_s)
