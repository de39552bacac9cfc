"""A run's clocks, waits and repeated work.

All of them belong to one object, so that tests can simulate hours without waiting.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, TypeVar

from launcher.in_parallel import map_parallel
from worker_entry.system import clock

CHECK_S = 0.1
"""How often slow work is checked."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Condition(Protocol):
    """A lock whose holder can wait until another thread has changed something, as `threading.Condition` is."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Event(Protocol):
    """A flag that threads can wait for, as `threading.Event` is."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Timing(Protocol):
    """The clocks, waits and threads of a run."""

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

    def sleep(self, seconds: float) -> None:
        """Returns after this time."""

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int) -> list[_Result]:
        """Returns the results in the order of the items; calls the function for up to `at_once` of them in parallel.

        Raises:
            Exception: of the first item for which the function has failed, once all are done.
        """

    def run_checked(self, work: Callable[[], _Result], check: Callable[[], None]) -> _Result:
        """Returns the result of slow work; calls `check` meanwhile, whose exception ends the wait, but not the work.

        An exception in the work itself could leave behind processes that it is just starting.
        """

    def start(self, work: Callable[[], object], name: str) -> None:
        """Does the work in a thread of its own.

        Raises:
            RuntimeError: no more threads are allowed.
        """

    def make_condition(self) -> Condition:
        """Returns a condition for the threads of `start`."""

    def make_event(self) -> Event:
        """Returns an event for the threads of `start`."""

    def jitter(self, seconds: float) -> float:
        """Returns a random time between half of `seconds` and all of it, which spreads what many nodes repeat."""


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

    def sleep(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0))

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int) -> list[_Result]:
        return map_parallel(function, items, at_once)

    def run_checked(self, work: Callable[[], _Result], check: Callable[[], None]) -> _Result:
        results: list[_Result] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:  # noqa: BLE001 - the caller gets it
                errors.append(error)

        worker = threading.Thread(target=run, name="work", daemon=True)
        worker.start()
        while worker.is_alive():
            check()
            worker.join(CHECK_S)
        if errors:
            raise errors[0]
        return results[0]

    def start(self, work: Callable[[], object], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def make_condition(self) -> Condition:
        return threading.Condition()

    def make_event(self) -> Event:
        return threading.Event()

    def jitter(self, seconds: float) -> float:
        return random.uniform(seconds / 2, seconds)  # noqa: S311 - only spreads what is repeated
