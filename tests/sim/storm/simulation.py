"""Simulated time, in which processes take turns: each of their threads runs in a greenlet until it waits."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import queue
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from tests.sim.clock import TurnTiming

T = TypeVar("T")
R = TypeVar("R")

BEGAN = 4_000_000_000.0
"""Unix seconds when a simulation begins; later than the times of all real files."""
TURNS_LIMIT = 300_000
"""After this many waits, the run counts as endless."""


class EndlessError(AssertionError):
    """The simulated run does not end."""


class Killed(BaseException):
    """Ends a simulated process as SIGKILL does: its code has no further effect."""


class Simulation:
    """The time, and what is due when. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.hub = getcurrent()
        """Where the simulation itself runs."""
        self.threads: list[Thread] = []
        self.running: Thread | None = None
        self._due: list[tuple[float, str, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._turns = 0
        self._environ: Mapping[str, str] = {}
        """The variables that the running process has, and before that, ours."""
        self._before: Mapping[str, str | None] = {}

    def after(self, seconds: float, do: Callable[[], object], place: str = "") -> None:
        """Calls `do` after this time; at equal times, in the order of the places: a set's order does not matter."""
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), place, next(self._numbers), do))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Lets time pass until the condition holds, nothing is due, or the clock shows `limit`."""
        self._give_turns()
        while not until():
            due = self._due[0][0] if self._due else limit
            for thread in self.threads:
                due = min(due, thread.wakes_at)
            if due >= limit:
                self.now = limit
                return
            self.now = due
            if self._due and self._due[0][0] <= due:
                heapq.heappop(self._due)[3]()
            self._give_turns()

    def _give_turns(self) -> None:
        is_quiet = False
        while not is_quiet:
            is_quiet = True
            for thread in [*self.threads]:
                if thread.is_awake:
                    is_quiet = False
                    self._turns += 1
                    if self._turns > TURNS_LIMIT:
                        raise EndlessError("the run does not end")
                    self._enter(thread.process)
                    thread.resume()
        self._leave()

    def _enter(self, process: Process) -> None:
        """Gives this process the variables that belong to it."""
        if process.environ is not self._environ:
            self._leave()
            self._environ = process.environ
            self._before = {name: os.environ.get(name) for name in process.environ}
            os.environ.update(process.environ)

    def _leave(self) -> None:
        if self._environ:
            for name, value in self._before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            self._environ = {}


class Thread:
    """Code of a process, which runs until it waits."""

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process = process
        self._simulation = process.simulation
        self._greenlet = greenlet(self._run, process.simulation.hub)
        self._work = work
        self._arrivals: queue.SimpleQueue[Any] | None = None
        self._until = self._simulation.now
        self._is_woken = False
        self._simulation.threads.append(self)
        process.threads.append(self)

    def _run(self) -> None:
        with contextlib.suppress(Killed):
            self._work()
        self._end()
        if self.process.main is self:
            self.process.kill()

    def _end(self) -> None:
        if self in self.process.threads:
            self.process.threads.remove(self)
            self._simulation.threads.remove(self)

    @property
    def wakes_at(self) -> float:
        return math.inf if self.process.is_suspended else self._until

    @property
    def is_awake(self) -> bool:
        if self.process.is_dead or self.process.is_suspended:
            return False
        has_item = self._arrivals is not None and not self._arrivals.empty()
        return has_item or self._is_woken or self._simulation.now >= self._until

    @property
    def is_current(self) -> bool:
        return getcurrent() is self._greenlet

    def resume(self) -> None:
        self._simulation.running = self
        self._greenlet.switch()
        self._simulation.running = None

    def wake(self) -> None:
        self._is_woken = True

    def pause(self, seconds: float, arrivals: queue.SimpleQueue[Any] | None = None) -> None:
        """Waits until the time has passed, the thread is woken, or the queue has an item."""
        if self.process.is_dead:
            raise Killed
        self._arrivals, self._until, self._is_woken = arrivals, self._simulation.now + max(seconds, 0.0), False
        self._simulation.hub.switch()
        self._arrivals, self._until, self._is_woken = None, math.inf, False

    def kill(self) -> None:
        """Ends it from outside."""
        self._end()
        if self._greenlet:  # it has begun
            self._greenlet.parent = getcurrent()
            self._greenlet.throw(Killed)


class Process:
    """A process of a simulated machine, which may be suspended or killed; it ends with its first thread.

    `environ`: the variables of its environment that differ from ours.
    """

    def __init__(
        self, simulation: Simulation, main: Callable[[], object], environ: Mapping[str, str] | None = None
    ) -> None:
        self.simulation = simulation
        self.environ = environ or {}
        self.threads: list[Thread] = []
        self.is_dead = self.is_suspended = self._is_killed = False
        self._waiting_for_thaw: list[Callable[[], object]] = []
        self.main = Thread(self, partial(self._run, main))

    def _run(self, main: Callable[[], object]) -> None:
        with contextlib.suppress(Killed):
            main()
        self.is_dead = True

    # --- for the world ---

    def suspend(self, seconds: float) -> None:
        """As SIGSTOP does, until SIGCONT follows."""
        self.is_suspended = True
        self.simulation.after(seconds, self._continue)

    def _continue(self) -> None:
        self.is_suspended = False
        waiting, self._waiting_for_thaw = self._waiting_for_thaw, []
        for do in waiting:
            if not self.is_dead:
                do()

    def kill(self) -> None:
        """Ends the process now, from within or from outside."""
        if self._is_killed:
            return
        self._is_killed = self.is_dead = True
        own = next((thread for thread in self.threads if thread.is_current), None)
        for thread in [*self.threads]:
            if thread is not own:
                thread.kill()
        if own is not None:
            raise Killed

    def do(self, function: Callable[[], object]) -> None:
        """Calls the function as a thread of the process would: not while it is suspended, never once it is dead."""
        if self.is_suspended:
            self._waiting_for_thaw.append(function)
        elif not self.is_dead:
            function()

    def after(self, seconds: float, function: Callable[[], object], place: str = "") -> None:
        """The same, after this time."""
        self.simulation.after(seconds, lambda: self.do(function), place)

    # --- for the process itself ---

    def wait(self, arrivals: queue.SimpleQueue[T], timeout_s: float) -> T:
        if arrivals.empty():
            self.current.pause(timeout_s, arrivals)
        return arrivals.get_nowait()

    @property
    def current(self) -> Thread:
        """The thread that runs now."""
        running = self.simulation.running
        assert running is not None
        assert running.process is self
        return running


class SimulatedCondition:
    """A condition; nothing else runs while a thread holds it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: list[Thread] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = self._process.simulation.now + (timeout if timeout is not None else math.inf)
        while not predicate():
            left_s = until - self._process.simulation.now
            if left_s <= 0:
                return False
            thread = self._process.current
            self._waiting.append(thread)
            try:
                thread.pause(left_s)
            finally:
                self._waiting.remove(thread)
        return True

    def notify_all(self) -> None:
        for thread in self._waiting:
            thread.wake()


class SimulatedEvent:
    """An event for the threads of one process."""

    def __init__(self, process: Process) -> None:
        self._changed = SimulatedCondition(process)
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._changed.wait_for(self.is_set, timeout)


class SimulatedTiming(TurnTiming):
    """The clocks, waits and threads of a simulated process; `ahead_s`: how far its clock is ahead."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        super().__init__()
        self._simulation = simulation
        self._process = process
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._simulation.now

    def now(self) -> float:
        return BEGAN + self._simulation.now + self.ahead_s

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        self._process.after(seconds, do)

    def wait(self, arrivals: queue.SimpleQueue[T], timeout_s: float) -> T:
        return self._process.wait(arrivals, timeout_s)

    def start(self, work: Callable[[], object], name: str) -> None:
        del name
        Thread(self._process, work)

    def make_condition(self) -> SimulatedCondition:
        return SimulatedCondition(self._process)

    def make_event(self) -> SimulatedEvent:
        return SimulatedEvent(self._process)

    def map(self, function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        results: dict[int, R] = {}
        errors: dict[int, Exception] = {}
        listed = [*items]
        rest = iter(range(at_once, len(listed)))

        def work(number: int | None) -> None:
            while number is not None:
                try:
                    results[number] = function(listed[number])
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    errors[number] = error
                done.put(None)
                number = next(rest, None)

        for number in range(min(at_once, len(listed))):
            self.start(partial(work, number), "map")
        for _ in listed:
            self.wait(done, math.inf)
        if errors:
            raise errors[min(errors)]
        return [results[number] for number in sorted(results)]
