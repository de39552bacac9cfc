"""What an agent asks of the machine below it: the time, its processes, their ports, and what wakes its loop.

It is one object, given to the agent's loop and everything that the loop drives, so that tests can simulate machines.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Optional, Protocol

from worker_entry.system import clock, kernel, processes
from worker_entry.system.signal_wakeup import wake_on_signals

if TYPE_CHECKING:
    from worker_entry.system.memory import OomWatch
    from worker_entry.system.ports import HeldPorts
    from worker_entry.system.process_use import ProcessUse


class Kernel(Protocol):
    """A machine, as one agent sees it. Pids are those below the agent."""

    # --- time ---

    def monotonic(self) -> float:
        """The time of a clock that never jumps, in seconds."""

    def now(self) -> float:
        """Unix seconds that never jump; see `clock.now`."""

    def steady(self, moment: float) -> float:
        """Converts a time of `now`; see `clock.steady`."""

    # --- the loop ---

    def make_selector(self) -> selectors.BaseSelector:
        """Returns a selector, which waits by this machine's time."""

    def wake_on_signals(self, end: Callable[[], None], warn: Optional[Callable[[], None]]) -> int:
        """Returns a descriptor that becomes readable when a child ends; see `signal_wakeup.wake_on_signals`."""

    # --- processes ---

    def spawn(
        self, argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int, stdin: Optional[int] = None
    ) -> int:
        """Starts a process in its own session; see `processes.spawn`."""

    def reap(self) -> Optional[tuple[int, int]]:
        """Returns the pid and the wait status of a child that has changed; None if none has."""

    def descendants(
        self, groups: Collection[int], *, spare: Collection[int], unreaped: bool = False
    ) -> list[kernel.Process]:
        """Returns all living processes below the agent; see `kernel.descendants`."""

    def below(self, pid: int) -> list[kernel.Process]:
        """Returns all living processes below a process."""

    def send_signal(self, process: kernel.Process, signum: int) -> bool:
        """Signals exactly this process; see `kernel.send_signal`."""

    def kill(self, pid: int, signum: int) -> None:
        """Signals a child that has not been reaped; raises OSError if that is impossible."""

    def kill_on_sight(self, spare: Collection[int]) -> set[int]:
        """Kills the processes below the agent as they are found; see `kernel.kill_on_sight`."""

    # --- facts about processes ---

    def may_notice(self, pid: int, signum: int) -> bool:
        """Whether the process catches or blocks the signal."""

    def read_use(self, pid: int) -> ProcessUse:
        """Returns what the process has used so far."""

    def waits(self, pid: int) -> bool:
        """Whether its main thread waits for a lock, for another process or for a child."""

    def find_waiting(self, texts: Mapping[int, str], ports: Collection[int]) -> set[int]:
        """Returns the processes that only other tasks can wake; see `mutual_waits.find_waiting`."""

    def open_files(self, pid: int) -> Collection[str]:
        """Returns the names of the files that it has open."""

    # --- what is made for each run ---

    def make_ports(self) -> HeldPorts:
        """Returns an object that holds ports of this machine."""

    def watch_memory(self) -> OomWatch:
        """Returns an object that detects when memory runs out."""


class SystemKernel:
    """The machine on which this process runs."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> float:
        return clock.now()

    def steady(self, moment: float) -> float:
        return clock.steady(moment)

    def make_selector(self) -> selectors.BaseSelector:
        return selectors.DefaultSelector()

    def wake_on_signals(self, end: Callable[[], None], warn: Optional[Callable[[], None]]) -> int:
        return wake_on_signals(end, warn)

    def spawn(
        self, argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int, stdin: Optional[int] = None
    ) -> int:
        return processes.spawn(argv, env=env, cwd=cwd, output=output, stdin=stdin)

    def reap(self) -> Optional[tuple[int, int]]:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return None
        return (pid, status) if pid else None

    def descendants(
        self, groups: Collection[int], *, spare: Collection[int], unreaped: bool = False
    ) -> list[kernel.Process]:
        return kernel.descendants(os.getpid(), groups, spare=spare, unreaped=unreaped)

    def below(self, pid: int) -> list[kernel.Process]:
        return kernel.descendants(pid)

    def send_signal(self, process: kernel.Process, signum: int) -> bool:
        return kernel.send_signal(process, signum)

    def kill(self, pid: int, signum: int) -> None:
        os.kill(pid, signum)

    def kill_on_sight(self, spare: Collection[int]) -> set[int]:
        return kernel.kill_on_sight(os.getpid(), spare)

    def may_notice(self, pid: int, signum: int) -> bool:
        from worker_entry.system.signal_state import may_notice

        return may_notice(pid, signum)

    def read_use(self, pid: int) -> ProcessUse:
        from worker_entry.system.process_use import read_use

        return read_use(pid)

    def waits(self, pid: int) -> bool:
        from worker_entry.system.process_use import waits

        return waits(pid)

    def find_waiting(self, texts: Mapping[int, str], ports: Collection[int]) -> set[int]:
        from worker_entry.system.mutual_waits import find_waiting

        return find_waiting(texts, ports)

    def open_files(self, pid: int) -> Collection[str]:
        return kernel.open_files(pid).values()

    def make_ports(self) -> HeldPorts:
        from worker_entry.system.ports import HeldPorts

        return HeldPorts()

    def watch_memory(self) -> OomWatch:
        from worker_entry.system.memory import OomWatch

        return OomWatch()
