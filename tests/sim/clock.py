"""Fake time that passes only while a caller waits: a run of hours takes milliseconds, always in the same order."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

from launcher.clock import Condition, Event

T = TypeVar("T")
R = TypeVar("R")

BEGAN = 1_700_000_000.0
"""Unix seconds when the fake monotonic clock shows 0."""
WAITS_LIMIT = 50_000
"""After this many waits, the run counts as endless."""


class TurnTiming(ABC):
    """What simulated timings share: all work is done in one thread, in turns."""

    def __init__(self) -> None:
        self.repeating = 0
        """How many functions are being repeated now."""

    @abstractmethod
    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Calls `do` after this time."""

    @abstractmethod
    def wait(self, arrivals: queue.SimpleQueue[T], timeout_s: float) -> T: ...

    def repeat(self, function: Callable[[], bool], every_s: float, first_s: float = 0.0) -> Callable[[], None]:
        self.repeating += 1
        ended = False

        def call() -> None:
            if ended:
                return
            if function():
                end()
            else:
                self.after(every_s, call)

        def end() -> None:
            nonlocal ended
            self.repeating -= not ended
            ended = True

        self.after(first_s, call)
        return end

    def sleep(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self.wait(queue.SimpleQueue[None](), seconds)

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        del at_once
        return [function(item) for item in items]

    def start(self, work: Callable[[], object], name: str) -> None:
        del name
        self.after(0.0, work)

    def make_condition(self) -> Condition:
        return threading.Condition()

    def make_event(self) -> Event:
        return threading.Event()

    def jitter(self, seconds: float) -> float:
        return seconds

    def run_checked(self, work: Callable[[], R], check: Callable[[], None]) -> R:
        check()
        return work()


class FakeTiming(TurnTiming):
    """A clock that calls each function when it is due, in the thread that waits for an item of a queue."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._waits = 0

    def monotonic(self) -> float:
        return self._now

    def now(self) -> float:
        return BEGAN + self._now

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self._now + seconds, next(self._numbers), do))

    def wait(self, arrivals: queue.SimpleQueue[T], timeout_s: float) -> T:
        self._waits += 1
        assert self._waits < WAITS_LIMIT, "the run does not end"
        until = self._now + max(timeout_s, 0.0)
        while arrivals.empty():
            if not self._due or self._due[0][0] > until:
                self._now = until
                raise queue.Empty
            self._now, _, do = heapq.heappop(self._due)
            do()
        return arrivals.get_nowait()
