"""Waiting for what happens elsewhere: an assertion is polled until it holds, or fails the test when its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.01, 0.5)
"""The shortest pause between two checks, and the longest."""


def eventually(check: Callable[[], T], timeout_s: float = 15.0) -> T:
    """Returns what `check` returns as soon as it raises no AssertionError; raises its last one after `timeout_s`.

    A check that takes long, as one does that starts a command, leaves most of a core to what it waits for.
    """
    shortest, longest = PAUSES_S
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        try:
            return check()
        except AssertionError:
            ended = time.monotonic()
            if ended >= deadline:
                raise
        time.sleep(min(max(shortest, 3 * (ended - began)), longest))
