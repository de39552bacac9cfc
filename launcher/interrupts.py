"""The signals by which a user, or the system, asks us to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


STACKS_SIGNAL = signal.SIGUSR1
"""With this the user asks what all tasks are doing."""


@contextlib.contextmanager
def noting_signals(note: Callable[[int], None], *more: signal.Signals) -> Iterator[None]:
    """Calls `note` with the number of each of these, and of `more`, that comes, instead of what it would do."""
    previous = {signum: signal.signal(signum, lambda number, _: note(number)) for signum in (*SIGNALS, *more)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
