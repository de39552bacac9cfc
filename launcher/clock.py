"""A run's clocks, waits and repeated work.

All of them belong to one object, so that tests can simulate hours without waiting.
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
    """The clocks and waits of a run."""

    def monotonic(self) -> float:
        """The time of a clock that never jumps, in seconds."""

    def now(self) -> float:
        """Unix seconds, for the times in reports."""

    def wait(self, arrivals: queue.SimpleQueue[_Item], timeout_s: float) -> _Item:
        """Returns the next item of the queue.

        Raises:
            queue.Empty: no item arrived within `timeout_s`.
        """

    def repeat(self, function: Callable[[], bool], every_s: float, first_s: float = 0.0) -> Callable[[], None]:
        """Calls `function` in the background after `first_s`, then `every_s` after each call, until it returns True.

        Returns:
            A function that ends the repetition without waiting for a call in progress.
        """


class SystemTiming:
    """This machine's clocks and threads."""

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
