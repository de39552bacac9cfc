"""Lets signals wake up a process that waits for descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""The signals that ask a process to end."""


def wake_on_signals(end: Callable[[], None]) -> int:
    """A descriptor that becomes readable when a child dies or a signal of `ENDING` arrives; the latter calls `end`."""
    wake, signalled = os.pipe()
    for descriptor in (wake, signalled):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in ENDING:
        signal.signal(signum, lambda *_: end())
    return wake
