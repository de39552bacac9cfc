"""Waiting for other processes and threads: an assertion is polled until it holds, or fails the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.01, 0.5)
"""The shortest pause between two checks, and the longest."""
HANG_S = 300.0
"""After this, a test fails that waits: something hangs, however slow and busy the machine is."""


def eventually(check: Callable[[], T], timeout_s: float = HANG_S) -> T:
    """Returns the result of `check` once it raises no AssertionError; raises the last AssertionError after `timeout_s`.

    After a slow check, such as one that starts a command, the pause is longer, so that checking takes little CPU.
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
