"""The tree of all processes below an agent, and how it is stopped.

A task leads its own session. A stop sends TERM to every process below the agent, waits for the grace period, and then
repeats KILL until the tree is empty; it does not end when only the tasks' own processes are dead. A stop that
interrupts sends INT to the tasks first, and TERM to what is left after them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from typing import Optional

from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.kernel import Process
from worker_entry.system.processes import kill_what_respawns

NOBODY: Mapping[int, float] = {}


class Tree:
    """The tree of all processes below this one; `add` registers the leaders of the tasks' sessions.

    Children in `spare` do not belong to the tree; a child that has ended is removed from `spare`.
    """

    def __init__(self, kernel: Kernel, *spare: set[int]) -> None:
        self._kernel = kernel
        self._spares = spare
        self.killed: set[int] = set()
        self.left_behind: set[int] = set()
        self.halts: list[tuple[int, int]] = []
        """Leaders that a signal suspended, as (pid, signal), or that continued, as (pid, 0); readers empty the list."""
        self.stopped: dict[int, float] = {}
        """When a stop began, for each leader that had not ended by then."""
        self._leaders: set[int] = set()
        self._reaped: set[int] = set()
        self._untouchable: set[int] = set()
        self._deadline: Optional[float] = None
        self._interrupted: Collection[int] = ()
        """The leaders that got INT, until TERM is sent."""
        self._longer: dict[int, float] = {}
        """The deadlines of leaders that get a longer grace, with all that they have started."""

    def add(self, leader: int) -> None:
        self._leaders.add(leader)
        self._reaped.discard(leader)  # a new process may have the pid of one that has ended

    def reap(self) -> list[tuple[int, int]]:
        """Reaps every dead child, adopted orphans included; returns (pid, wait status) of the leaders among them."""
        dead: list[tuple[int, int]] = []
        while (changed := self._kernel.reap()) is not None:
            pid, status = changed
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid in self._leaders:
                    self.halts.append((pid, os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0))
            elif pid in self._spare:
                for pids in self._spares:
                    pids.discard(pid)
            elif pid in self._leaders and pid not in self._reaped:
                self._reaped.add(pid)
                dead.append((pid, status))
        return dead

    @property
    def _spare(self) -> set[int]:
        return set().union(*self._spares)

    def living(self) -> list[Process]:
        return self._kernel.descendants(self._leaders, spare=self._spare)

    @property
    def stopping(self) -> bool:
        return self._deadline is not None

    @property
    def interrupts(self) -> bool:
        """Whether the processes of an ongoing stop have got INT, and not TERM yet."""
        return bool(self._interrupted)

    def stop(
        self,
        grace_s: float,
        *,
        asks: bool = True,
        at_once: Collection[int] = (),
        longer: Mapping[int, float] = NOBODY,
        interrupted: Optional[Mapping[int, bool]] = None,
    ) -> None:
        """Sends TERM now; after `grace_s`, `sweep` sends KILL. A second call can only shorten the grace period.

        Without `asks`, sends no TERM, because all processes have already received it. Processes in `at_once` get KILL
        now. `longer`: the graces of leaders that get a longer one. `interrupted`: the leaders that get INT in place of
        TERM, each with all of its process group or alone; a second call, or the end of these leaders, sends TERM.
        """
        now = self._kernel.monotonic()
        deadline = now + grace_s
        if self._deadline is not None:
            before, self._deadline = self._deadline, min(deadline, self._deadline)
            self._longer = {pid: min(until, deadline) for pid, until in self._longer.items()}
            if self._interrupted and not interrupted:
                self._longer |= {pid: min(now + longer_s, before) for pid, longer_s in longer.items()}
                self._terminate()
            return
        self._deadline = deadline
        living = {process.pid for process in self.living()}
        self.stopped = dict.fromkeys(self._leaders & living, self._kernel.now())
        self._longer = {pid: now + longer_s for pid, longer_s in longer.items()}
        if interrupted:
            self._interrupted = frozenset(interrupted)
            for process in self.living():
                if process.pid in interrupted or interrupted.get(process.group, False):
                    self._ask(process, signal.SIGINT)
        else:
            self._terminate(asks=asks, at_once=at_once)

    def _terminate(self, *, asks: bool = True, at_once: Collection[int] = ()) -> None:
        self._interrupted = ()
        for process in self.living():
            if process.pid not in self._leaders:
                self._note_left_behind(process)
            if process.pid in at_once:
                self._kill([process])
            elif asks:
                self._ask(process, signal.SIGTERM)

    def _ask(self, process: Process, signum: int) -> None:
        if self._signal(process, signum):
            self._signal(process, signal.SIGCONT)  # a suspended process receives the signal only when it continues

    def sweep(self) -> int:
        """Performs one round of an ongoing stop; returns how many processes are left, zombies included."""
        assert self._deadline is not None
        if self._interrupted and self._reaped.issuperset(self._interrupted):
            self._terminate()
        left, now = self._left(), self._kernel.monotonic()
        if left and now >= self._deadline:
            spared = {pid for pid, until in self._longer.items() if now < until}
            due = [process for process in left if spared.isdisjoint((process.pid, process.group, process.parent))]
            self._kill(due)
            if len(due) == len(left):
                spare = self._untouchable | self._spare
                self.killed |= kill_what_respawns(lambda: self._kernel.kill_on_sight(spare))
        return len(left)

    def _left(self) -> list[Process]:
        found = self._kernel.descendants(self._leaders, spare=self._spare, unreaped=True)
        return [process for process in found if process.pid not in self._untouchable]

    def _kill(self, left: list[Process]) -> None:
        for process in left:
            if process.zombie:
                continue
            if process.pid not in self._leaders:
                self._note_left_behind(process)
            if self._signal(process, signal.SIGKILL):
                self.killed.add(process.pid)

    def _signal(self, process: Process, signum: int) -> bool:
        try:
            return self._kernel.send_signal(process, signum)
        except PermissionError:  # another user's process (`sudo`): it can be neither stopped nor awaited
            self._untouchable.add(process.pid)
            return False

    def _note_left_behind(self, process: Process) -> None:
        # While a leader lives, the process may still work for it; a tree without leaders only runs checks.
        if self._leaders and not self._leaders - self._reaped:
            self.left_behind.add(process.pid)
