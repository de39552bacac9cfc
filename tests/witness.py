"""An independent witness of processes: psutil, not distlaunch, looks for a mark in their environments."""

from __future__ import annotations

import contextlib
import gc
import os
import uuid
from collections.abc import Callable, Iterator

import psutil

from tests.polling import eventually

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


def open_descriptors() -> set[str]:
    """This process's open descriptors, without those that an earlier test has left to the garbage collector.

    A thread of an earlier test may still close some, so compare by `<=`, which finds all new ones.
    """
    gc.collect()
    return set(os.listdir("/dev/fd"))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Polls until the condition holds; fails the test if it does not in time."""

    def check() -> None:
        assert condition(), f"not within {timeout_s:g} s: {what}"

    eventually(check, timeout_s)
