"""Waiting for what happens elsewhere: an assertion is polled until it holds, or fails the test when its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout_s: float = 15.0) -> T:
    """Returns what `check` returns as soon as it raises no AssertionError; raises its last one after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.01)
