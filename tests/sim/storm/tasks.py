"""Simulated tasks: processes of one program that starts, joins its cluster, trains, and ends in some way."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from worker_entry.protocol.messages import (
    Exited,
    Halted,
    InterruptTaken,
    Listening,
    Message,
    Returned,
    Saved,
    Started,
    Status,
)
from worker_entry.protocol.values import Activity, CrashRecord, Progress, TaskExit, TaskStatus

if TYPE_CHECKING:
    from tests.sim.storm.machines import Machine
    from tests.sim.storm.world import World

FOREVER = math.inf
PAUSES_AT = 20
"""The step after which a program pauses, if it does."""
IDLE_S = 1000.0


@functools.cache
def name_members(*counts: tuple[str, int]) -> frozenset[str]:
    """The tasks of a cluster that has so many of each type; all of its tasks share the set."""
    return frozenset(f"{task_type}:{index}" for task_type, count in counts for index in range(count))


class TaskHost(Protocol):
    """What runs tasks, and finds out what they do."""

    @property
    def machine(self) -> Machine: ...

    @property
    def world(self) -> World: ...

    @property
    def is_fenced(self) -> bool:
        """Whether everything below it will certainly end before it can act."""

    def time(self) -> float:
        """Unix seconds by its clock."""

    def write(self, task: TaskProcess, line: bytes) -> None:
        """The task prints a line."""

    def say(self, message: Message) -> None:
        """A task does something that its host finds out."""

    def note_end(self, task: TaskProcess, ended: Exited) -> None:
        """The task's process has ended."""


class TaskProcess:
    """A task's process; what is real of it is in `end_reason`, what its agent reports in the messages."""

    def __init__(self, host: TaskHost, name: str, attempt: int, start: int) -> None:
        self.host = host
        self.machine = host.machine
        self.world = host.world
        self.name = name
        self.role = host.world.find_role(name)
        self.attempt = attempt
        self.start = start
        self.program = host.world.scenario.program
        self.is_alive = True
        self.has_succeeded = False
        """Whether its program has ended without a failure, by itself."""
        self.is_hung = self.is_halted = False
        self.works = False
        """Whether it is at work although it hangs."""
        self.is_paused = False
        """Whether it waits for something that is not a task."""
        self.started = Started(name, 8, self.host.time(), start)
        self.status: Status | None = None
        self.halted: Halted | None = None
        self.returned: Returned | None = None
        self.ended: Exited | None = None
        self.ended_at = FOREVER
        self._is_over = False
        """Whether its program has ended."""
        self._crash: CrashRecord | None = None
        self._finished: float | None = None
        self._cluster: frozenset[str] = frozenset()
        self._left_s = self.program.trains_s
        self._step = 0
        self._began = 0.0
        self._is_open = False
        self._stuck: list[Callable[[], object]] = []
        self._kill_at = FOREVER
        self._stopped: float | None = None
        """When its agent began to stop it, on its machine's clock."""
        self._stays_s: float | None = None
        """How long the process stays once its program has ended; infinite: until it is ended."""

    @property
    def has_handler(self) -> bool:
        return self.program.on_stop == "save"

    @property
    def is_stuck(self) -> bool:
        """Whether it does nothing now, although it lives."""
        return self.is_hung or self.is_halted or self.machine.is_frozen

    @property
    def is_at_work(self) -> bool:
        """Whether it uses the processor, reads or writes."""
        if not self.is_alive or self._is_over or self.is_halted or self.machine.is_frozen:
            return False
        forms = self._is_open and not self._began
        waits = self.is_paused or (self.role == "trainer" and (forms or self.world.waits_for_peer(self)))
        return self.works if self.is_hung else not waits

    @property
    def is_stuck_for_certain(self) -> bool:
        """Whether only another task can wake it."""
        return self.is_alive and not self._is_over and not self.is_at_work and (self.is_hung or not self.is_paused)

    @property
    def activity(self) -> Activity:
        return Activity(0.0 if self.is_at_work else IDLE_S, not self.is_at_work, self.is_stuck_for_certain)

    def _later(self, seconds: float, do: Callable[[], object]) -> None:
        self.machine.later(seconds, partial(self._do, do))

    def _do(self, do: Callable[[], object]) -> None:
        if not self.is_alive:
            return
        if self.is_hung or self.is_halted:
            self._stuck.append(do)
        else:
            do()

    def print(self, text: str) -> None:
        line = f"{self.name} {self.start} {text}\n".encode()
        self.world.note_output(self, line)
        self.host.write(self, line)

    # --- its program ---

    def begin(self, cluster: frozenset[str]) -> None:
        self._cluster = cluster
        self.print("starts")
        self._later(self.program.starts_s * self.machine.chance.uniform(0.8, 1.2), self._open)

    def _open(self) -> None:
        if self._is_over:
            return
        if self._cluster:
            self._is_open = True
            if not self.world.is_torch or self.name == "worker:0":
                self.host.say(Listening(self.name, self.host.time()))
            self.world.join(self, self._cluster)
        else:
            self.train()

    def train(self) -> None:
        """Called once the cluster is formed."""
        if self.role in ("server", "auxiliary"):
            return
        self._began = self.host.time()
        self._later(0.1, self._tick)

    def _tick(self) -> None:
        """Trains for a while, if the others do."""
        if self._is_over:
            return
        if self.role == "trainer" and (lost := self.world.find_lost_peer(self)):
            self.print(f"misses {lost}")
            if self.program.on_loss == "crash":
                crash = partial(self.crash, "UnavailableError: Socket closed")
                self._later(self.machine.chance.uniform(0.1, 3.0), crash)
            return
        if self.role == "trainer" and self.world.waits_for_peer(self):
            self._later(2.0, self._tick)
            return
        if self._left_s <= 0:
            self.finish()
            return
        part_s = min(self.program.report_s or 5.0, self._left_s)
        self._left_s -= part_s
        self.is_paused = self._step == PAUSES_AT and self.program.pause_s > 0
        self._later(part_s + self.program.pause_s * self.is_paused, self._report)

    def _report(self) -> None:
        self.is_paused = False
        if self._is_over:
            return
        trained_s = self.program.trains_s - self._left_s
        if 0 < self.program.breaks_after_s <= trained_s:
            self.crash("ValueError: no batch")
            return
        self._step += 10
        self.print(f"step {self._step}")
        if self.program.report_s and self.role == "trainer":
            now = self.host.time()
            progress = Progress(self._step, 1, self._step, self._began, now, p99_s=0.1)
            self.status = Status(self.name, TaskStatus("trains", self._began, progress))
            self.host.say(self.status)
        if self.program.saves and self.role == "trainer":
            self.host.say(Saved(f"ckpt-{self._step}", self.host.time()))
        self._tick()

    def finish(self) -> None:
        """Its program ends without a failure."""
        if self._is_over:
            return
        self._is_over = self.has_succeeded = True
        self._finished = self.host.time()
        self.returned = Returned(self.name, self._finished, start=self.start)
        self.host.say(self.returned)
        self._leave(TaskExit(0))

    def crash(self, text: str) -> None:
        """Its program raises."""
        if self._is_over:
            return
        self._is_over = True
        exception, _, message = text.partition(": ")
        self._crash = CrashRecord(self.host.time(), exception, message, "train.py", 9)
        self.print(text)
        if self._stays_s is not None:
            self.returned = Returned(self.name, self.host.time(), self._crash, self.start)
            self.host.say(self.returned)
        self._leave(TaskExit(1))

    def _leave(self, how: TaskExit) -> None:
        stays_s = self._stays_s if self._stays_s is not None else self.machine.chance.uniform(0.0, 0.4)
        if stays_s < FOREVER:
            self._later(stays_s, partial(self.end, how))

    def stay(self, seconds: float) -> None:
        """Its process will stay that long after the end of the program."""
        self._stays_s = seconds

    def hang(self, *, works: bool) -> None:
        self.is_hung, self.works = True, works
        self.world.was_stuck = True

    def unhang(self) -> None:
        self.is_hung = False
        self._go_on()

    def halt(self) -> None:
        self.is_halted = self.world.was_stuck = True
        self.halted = Halted(self.name, signal.SIGSTOP, self.host.time())
        self.host.say(self.halted)

    def unhalt(self) -> None:
        if self.is_alive and self.is_halted:
            self.is_halted = False
            self.halted = Halted(self.name, 0, self.host.time())
            self.host.say(self.halted)
            self._go_on()

    def _go_on(self) -> None:
        stuck, self._stuck = self._stuck, []
        for do in stuck:
            self._do(do)

    # --- signals ---

    def note_stop(self) -> None:
        if self._stopped is None:
            self._stopped = self.host.time()

    def interrupt(self) -> None:
        if self.program.on_stop == "ignore" or self.is_hung:
            return
        self.host.say(InterruptTaken(self.name))
        self._later(self._save_s, partial(self.end, TaskExit(signal=signal.SIGINT)))

    def terminate(self) -> None:
        if self.program.on_stop == "save":
            self._later(self._save_s, partial(self.end, TaskExit(143)))
        elif self.program.on_stop == "die" and not self.is_halted:
            self.machine.later(0.02, partial(self.end, TaskExit(signal=signal.SIGTERM)))

    @property
    def _save_s(self) -> float:
        return self.program.save_s if self.program.on_stop == "save" else 0.1

    def kill_after(self, seconds: float) -> None:
        due = self.world.simulation.now + seconds
        if due < self._kill_at:
            self._kill_at = due
            self.machine.later(seconds, self._kill_if_due)
        if seconds <= 0:
            self._kill_if_due()

    def _kill_if_due(self) -> None:
        if self.is_alive and self.world.simulation.now >= self._kill_at:
            self.end(TaskExit(signal=signal.SIGKILL))

    def end(self, how: TaskExit) -> None:
        if not self.is_alive:
            return
        self.is_alive, self.ended_at = False, self.world.simulation.now
        self.world.note_end(self, how)
        self.has_succeeded = self.has_succeeded or how.ok
        now = self.host.time()
        crash = self._crash if not how.ok else None
        before_stop = self._stopped is None or (self._finished is not None and self._finished < self._stopped)
        self.ended = Exited(self.name, how, now, crash, self._finished, None, self.start, before_stop)
        self.host.note_end(self, self.ended)

    def vanish(self) -> None:
        """Its machine is off."""
        self.is_alive = False
        self.world.note_end(self, None)
