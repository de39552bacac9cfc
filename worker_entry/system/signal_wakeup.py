"""Makes signals wake up a process that waits for descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Optional

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""The signals that ask a process to end."""


WARNING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals with which an engine may warn all processes of a node."""


_pipe: list[int] = []


def wake_on_signals(end: Callable[[], None], warn: Optional[Callable[[], None]] = None) -> int:
    """Returns a descriptor that becomes readable when a child dies or one of these signals arrives.

    The descriptor replaces that of an earlier call, which is closed. Signals in `ENDING` call `end`. With `warn`,
    signals in `WARNING` call `warn` instead.
    """
    wake, signalled = os.pipe()
    for descriptor in (wake, signalled):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    for descriptor in _pipe:
        os.close(descriptor)
    _pipe[:] = wake, signalled
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for signum in ENDING:
        signal.signal(signum, lambda *_: end())
    if warn is not None:
        note = warn
        for signum in WARNING:
            signal.signal(signum, lambda *_: note())
    return wake
