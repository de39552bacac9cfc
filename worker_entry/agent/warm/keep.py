"""Decides whether an agent stays after its run, with its forkserver, for the next run."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Optional

from worker_entry.protocol.messages import KeptWarm
from worker_entry.system.engine import is_managed

if TYPE_CHECKING:
    from worker_entry.agent.tasks.forkserver import ForkserverClient
    from worker_entry.agent.tasks.warm_forkserver import WarmForkserver
    from worker_entry.agent.warm.rendezvous import WaitingSocket

SHORTEST_S = 1.0
"""No run can begin in less time."""


class KeepWarm:
    """Whether one agent stays for the next run.

    Args:
        until: how long an earlier run has asked it to stay, in seconds since 1970.
        allowed: whether this process may outlive its run.
    """

    def __init__(self, *, until: float, allowed: bool) -> None:
        self.until = until
        self.kept: Optional[WarmForkserver] = None
        """The forkserver for the next run; the caller owns it."""
        self.waiting: Optional[WaitingSocket] = None
        """The socket on which to wait for the next run; the caller owns it as well."""
        self.is_wanted = False
        """Whether the controller wants an answer, and keeps reading for it."""
        self.is_asked = False
        """Whether that answer is still due."""
        self._allowed = allowed

    @property
    def is_expected(self) -> bool:
        """Whether this agent stays even if its run asks for nothing."""
        return self.until > time.time() + SHORTEST_S

    def ask(self, seconds: float) -> None:
        """Notes that the run is over, and that its controller wants the agent to stay for `seconds`."""
        self.until = max(self.until, time.time() + seconds)
        self.is_wanted = self.is_asked = self.is_expected

    def answer(self, forkserver: ForkserverClient, *, isolated: bool) -> Optional[KeptWarm]:
        """Detaches the forkserver, if it can be kept; returns the answer for the controller, if there is one."""
        self.is_asked = False
        if is_managed():
            return KeptWarm(0.0, [], 0, "a Slurm step ends with its run")
        if isolated or not self._allowed:
            why = "its tasks had a network of their own" if isolated else "only Linux can keep it"
            return KeptWarm(0.0, [], 0, why)
        self.kept, problem = forkserver.keep()
        if self.kept is None:
            return KeptWarm(0.0, [], 0, problem) if problem else None
        # Few runs need these.
        from worker_entry.agent.warm.fingerprint import make_key
        from worker_entry.agent.warm.rendezvous import WaitingSocket, WarmAgent
        from worker_entry.system.process_use import read_own_memory

        self.waiting = WaitingSocket.take(make_key())
        if self.waiting is None:
            self.kept.end()
            self.kept = None
            return KeptWarm(0.0, [], 0, "another agent of yours waits there already")
        guardian, me = os.getppid(), os.getpid()
        pids = [guardian, me, self.kept.pid]
        held = sum(map(read_own_memory, pids))
        self.waiting.note(WarmAgent(me, guardian, self.until, held, sys.executable))
        return KeptWarm(self.until - time.time(), pids, held)
