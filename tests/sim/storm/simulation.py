"""Simulated time, in which several controllers take turns: each runs until it waits, in a greenlet of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
from collections.abc import Callable
from typing import Any, TypeVar

from greenlet import greenlet

from tests.sim.clock import TurnTiming

T = TypeVar("T")

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
        self._due: list[tuple[float, str, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.processes: list[Process] = []
        self._turns = 0

    def after(self, seconds: float, do: Callable[[], object], place: str = "") -> None:
        """Calls `do` after this time; at equal times, in the order of the places: a set's order does not matter."""
        heapq.heappush(self._due, (self.now + max(seconds, 0.0), place, next(self._numbers), do))

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Lets time pass until the condition holds, nothing is due, or the clock shows `limit`."""
        self._give_turns()
        while not until():
            due = self._due[0][0] if self._due else limit
            for process in self.processes:
                due = min(due, process.wakes_at)
            if due >= limit:
                self.now = limit
                return
            self.now = due
            if self._due and self._due[0][0] <= due:
                heapq.heappop(self._due)[3]()
            self._give_turns()

    def _give_turns(self) -> None:
        for process in [*self.processes]:
            while process.is_awake:
                self._turns += 1
                if self._turns > TURNS_LIMIT:
                    raise EndlessError("the run does not end")
                process.resume()


class Process:
    """A process of a controller's machine: its code runs in `main` until it waits; it may be suspended or killed."""

    def __init__(self, simulation: Simulation, main: Callable[[], object]) -> None:
        self._simulation = simulation
        self._greenlet = greenlet(self._run)
        self._main = main
        self._arrivals: queue.SimpleQueue[Any] | None = None
        self._until = simulation.now
        self.is_dead = self.is_suspended = False
        self._waiting_for_thaw: list[Callable[[], object]] = []
        simulation.processes.append(self)

    def _run(self) -> None:
        with contextlib.suppress(Killed):
            self._main()
        self.is_dead = True
        self._simulation.processes.remove(self)

    # --- for the simulation ---

    @property
    def wakes_at(self) -> float:
        return float("inf") if self.is_suspended else self._until

    @property
    def is_awake(self) -> bool:
        if self.is_dead or self.is_suspended:
            return False
        has_item = self._arrivals is not None and not self._arrivals.empty()
        return has_item or self._simulation.now >= self._until

    def resume(self) -> None:
        self._greenlet.switch()

    # --- for the world ---

    def suspend(self, seconds: float) -> None:
        """As SIGSTOP does, until SIGCONT follows."""
        self.is_suspended = True
        self._simulation.after(seconds, self._continue)

    def _continue(self) -> None:
        self.is_suspended = False
        waiting, self._waiting_for_thaw = self._waiting_for_thaw, []
        for do in waiting:
            if not self.is_dead:
                do()

    def kill(self) -> None:
        """Ends the process now, from within or from outside."""
        if self.is_dead:
            return
        self.is_dead = True
        if greenlet.getcurrent() is self._greenlet:
            raise Killed
        self._greenlet.throw(Killed)

    def do(self, function: Callable[[], object]) -> None:
        """Calls the function as a thread of the process would: not while it is suspended, never once it is dead."""
        if self.is_suspended:
            self._waiting_for_thaw.append(function)
        elif not self.is_dead:
            function()

    def after(self, seconds: float, function: Callable[[], object], place: str = "") -> None:
        """The same, after this time."""
        self._simulation.after(seconds, lambda: self.do(function), place)

    # --- for the process itself ---

    def wait(self, arrivals: queue.SimpleQueue[T], timeout_s: float) -> T:
        if arrivals.empty():
            self._arrivals, self._until = arrivals, self._simulation.now + max(timeout_s, 0.0)
            parent = self._greenlet.parent
            assert parent is not None
            parent.switch()
            self._arrivals, self._until = None, float("inf")
        return arrivals.get_nowait()


class SimulatedTiming(TurnTiming):
    """The clocks and waits of a simulated process; `ahead_s`: how far its clock is ahead."""

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
