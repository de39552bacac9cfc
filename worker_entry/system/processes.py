"""Starts tasks, and stops them together with every process that the tasks have started.

A task leads its own session. A stop sends TERM to every process below the agent, waits for the grace period, and then
repeats KILL until the tree is empty; it does not end when only the tasks' own processes are dead. A stop that
interrupts sends INT to the tasks first, and TERM to what is left after them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Optional

from worker_entry.system import kernel

KILL_PAUSES_S = (0.005, 1.0)
"""Shortest and longest pause between rounds of KILL: a process that waits for a hanging disk cannot die at once."""
NOBODY: Mapping[int, float] = {}
KILL_ROUNDS = 50
"""How often `kill_on_sight` is repeated against processes that respawn faster than all processes can be listed."""


def spawn(argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int, stdin: Optional[int] = None) -> int:
    """Starts a process in its own session; the process dies with this one. Its stdout and stderr go to `output`.

    Returns its pid; the caller must reap it.

    Raises:
        OSError: the process cannot be started (not found, not executable, arguments or environment too long).
    """
    import subprocess

    parent = os.getpid()
    process = subprocess.Popen(
        list(argv),
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        # Safe: this process has one thread, and the C library is already loaded.
        preexec_fn=lambda: kernel.die_with_parent(signal.SIGKILL, parent),
    )
    process.returncode = 0  # Popen must not wait for it
    return process.pid


def become_independent(kept: Collection[int] = ()) -> None:
    """Called in a forked child: resets signal handlers, and closes all descriptors but 0 to 2 and `kept`.

    The child must not keep a descriptor open that the parent closes: a held port would get a task's connections, a GPU
    would stay reserved, and the controller's connection would not end with the agent.
    """
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def end_children(pids: set[int]) -> None:
    """Kills these children, waits for their end, and empties the set."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()


class Tree:
    """The tree of all processes below this one; `add` registers the leaders of the tasks' sessions.

    Children in `spare` do not belong to the tree; a child that has ended is removed from `spare`.
    """

    def __init__(self, *spare: set[int]) -> None:
        self._spares = spare
        self.killed: set[int] = set()
        self.left_behind: set[int] = set()
        self.halts: list[tuple[int, int]] = []
        """Leaders that a signal suspended, as (pid, signal), or that continued, as (pid, 0); readers empty the list."""
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return dead
            if pid == 0:
                return dead
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                if pid in self._leaders:
                    self.halts.append((pid, os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0))
            elif pid in self._spare:
                for pids in self._spares:
                    pids.discard(pid)
            elif pid in self._leaders and pid not in self._reaped:
                self._reaped.add(pid)
                dead.append((pid, status))

    @property
    def _spare(self) -> set[int]:
        return set().union(*self._spares)

    def living(self) -> list[kernel.Process]:
        return kernel.descendants(os.getpid(), self._leaders, spare=self._spare)

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
        now = time.monotonic()
        deadline = now + grace_s
        if self._deadline is not None:
            before, self._deadline = self._deadline, min(deadline, self._deadline)
            self._longer = {pid: min(until, deadline) for pid, until in self._longer.items()}
            if self._interrupted and not interrupted:
                self._longer |= {pid: min(now + longer_s, before) for pid, longer_s in longer.items()}
                self._terminate()
            return
        self._deadline = deadline
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

    def _ask(self, process: kernel.Process, signum: int) -> None:
        if self._signal(process, signum):
            self._signal(process, signal.SIGCONT)  # a suspended process receives the signal only when it continues

    def sweep(self) -> int:
        """Performs one round of an ongoing stop; returns how many processes are left, zombies included."""
        assert self._deadline is not None
        if self._interrupted and self._reaped.issuperset(self._interrupted):
            self._terminate()
        left, now = self._left(), time.monotonic()
        if left and now >= self._deadline:
            spared = {pid for pid, until in self._longer.items() if now < until}
            due = [process for process in left if spared.isdisjoint((process.pid, process.group, process.parent))]
            self._kill(due)
            if len(due) == len(left):
                self.killed |= _kill_what_respawns(self._untouchable | self._spare)
        return len(left)

    def _left(self) -> list[kernel.Process]:
        found = kernel.descendants(os.getpid(), self._leaders, spare=self._spare, unreaped=True)
        return [process for process in found if process.pid not in self._untouchable]

    def _kill(self, left: list[kernel.Process]) -> None:
        for process in left:
            if process.zombie:
                continue
            if process.pid not in self._leaders:
                self._note_left_behind(process)
            if self._signal(process, signal.SIGKILL):
                self.killed.add(process.pid)

    def _signal(self, process: kernel.Process, signum: int) -> bool:
        try:
            return kernel.send_signal(process, signum)
        except PermissionError:  # another user's process (`sudo`): it can be neither stopped nor awaited
            self._untouchable.add(process.pid)
            return False

    def _note_left_behind(self, process: kernel.Process) -> None:
        # While a leader lives, the process may still work for it; a tree without leaders only runs checks.
        if self._leaders and not self._leaders - self._reaped:
            self.left_behind.add(process.pid)


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kills all processes below this one, except for `spare` and their descendants, until no process is left."""
    me = os.getpid()
    untouchable: set[int] = set()
    pause_s = KILL_PAUSES_S[0]
    while True:
        found = kernel.descendants(me, spare=spare, unreaped=True)
        left = [process for process in found if process.pid not in untouchable]
        if not left:
            return
        for process in left:
            try:
                kernel.send_signal(process, signal.SIGKILL)
            except PermissionError:  # another user's process
                untouchable.add(process.pid)
        for process in left:
            with contextlib.suppress(ChildProcessError):  # an adopted orphan stays a zombie until it is reaped
                os.waitpid(process.pid, os.WNOHANG)
        _kill_what_respawns({*spare, *untouchable})
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, KILL_PAUSES_S[1])


def _kill_what_respawns(spare: Collection[int]) -> set[int]:
    """Kills processes that respawn and exit before all processes can be listed."""
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        hit = kernel.kill_on_sight(os.getpid(), spare)
        if hit and hit <= killed:  # all of them are already dying
            break
        killed |= hit
    return killed
