"""Time as a run sees it: its clocks, the one place where the controller waits, and what is done again and again.

All of it is one object, so that tests let hours pass without waiting for them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from worker_entry.system import clock

_Item = TypeVar("_Item")


class Timing(Protocol):
    """What a run knows of time."""

    def monotonic(self) -> float:
        """Seconds of a clock that never jumps."""

    def now(self) -> float:
        """Unix seconds, from which times in reports are made."""

    def wait(self, arrivals: queue.SimpleQueue[_Item], timeout_s: float) -> _Item:
        """The next item of the queue.

        Raises:
            queue.Empty: there was none within `timeout_s`.
        """

    def repeat(self, function: Callable[[], bool], every_s: float, first_s: float = 0.0) -> Callable[[], None]:
        """Calls `function` beside the caller, after `first_s` and then `every_s` after each call, until that is True.

        Returns:
            What ends it; a call that is under way is not waited for.
        """


class SystemTiming:
    """This machine's clocks, and threads."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return clock.now()

    def wait(self, arrivals: queue.SimpleQueue[_Item], timeout_s: float) -> _Item:
        return arrivals.get(timeout=max(timeout_s, 0.0))

    def repeat(self, function: Callable[[], bool], every_s: float, first_s: float = 0.0) -> Callable[[], None]:
        ended = threading.Event()

        def run() -> None:
            wait_s = first_s
            while not ended.wait(wait_s) and not function():
                wait_s = every_s

        threading.Thread(target=run, daemon=True).start()
        return ended.set
