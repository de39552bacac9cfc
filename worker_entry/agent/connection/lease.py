"""The lease: how long an agent continues without proof that its messages reach the controller.

The controller gives up a node that has sent nothing during the lease, and may then start the same tasks elsewhere. The
agent therefore cannot rely on what it receives: the link may be broken in the other direction only. It stamps its
answer to each beat, and the controller returns the last stamp it received with its next beat. The lease runs from
the time of that stamp, which is earlier than the moment when the controller last received something.

If the controller is on another machine, time during which the agent's machine sleeps counts, because the controller
does not sleep. If both are on one machine, it does not count, because both sleep.
"""

from __future__ import annotations

import mmap
from typing import Optional

from worker_entry.system.agent_kernel import Kernel

LONGEST_TURN_S = 2.0
"""If more time passes between two turns, the agent was not running."""
GRACE_S = 2.0
"""From TERM to KILL after the lease has expired."""
HANG_S = 6.0
"""An agent that still runs this long after its lease has expired hangs; its guardian kills everything below it."""
MARGIN_S = 10.0
"""Seconds after the lease has expired until no process of the run is left on the node, whatever its agent does."""
TICK_S = 1.0
"""How often the guardian checks."""
SHORTEST_LIMIT_S = 5.0
"""A slow disk may block a healthy agent for some seconds, however short the lease is."""


class Lease:
    """An agent's lease.

    Args:
        seconds: its length.
        far: whether the controller is on another machine.
        kernel: has its clocks.
    """

    def __init__(self, seconds: float, *, far: bool, kernel: Kernel) -> None:
        self.seconds = seconds
        self._far = far
        self._kernel = kernel
        self._looked = kernel.monotonic()
        self._awake_s = 0.0
        self._confirmed = self.stamp()

    def stamp(self) -> float:
        """The stamp for an answer to a beat: the time by the lease's own clock."""
        if self._far:
            return self._kernel.now()
        now = self._kernel.monotonic()
        passed_s, self._looked = now - self._looked, now
        self._awake_s += min(passed_s, LONGEST_TURN_S)
        return self._awake_s

    def confirm(self, stamp: Optional[float]) -> None:
        """Notes that the controller has received the answer with this stamp; None: no answer yet."""
        if stamp is not None and self._confirmed < stamp <= self.stamp():
            self._confirmed = stamp

    @property
    def end(self) -> float:
        """When it expires, by the clock that the guardian shares (`clock.steady`); 0 if only the agent can know."""
        return self._kernel.steady(self._confirmed + self.seconds) if self._far else 0.0

    @property
    def overdue_s(self) -> float:
        """Seconds since it expired; negative before that."""
        return self.stamp() - self._confirmed - self.seconds


class LoopCounter:
    """Counts the turns of an agent's loop, so that the guardian notices a hang.

    The guardian makes it before it forks; the agent calls `advance`. They share memory rather than a pipe: counting
    costs the agent no system call, never blocks it, and never wakes the guardian.
    """

    def __init__(self, limit_s: float) -> None:
        self._values = memoryview(mmap.mmap(-1, 24)).cast("d")
        self.limit_s = limit_s

    def advance(self, lease_end: float) -> None:
        """Counts one turn and publishes when the agent's lease ends, by `clock.steady`; 0: only the agent can know."""
        self._values[0] += 1.0
        self._values[2] = lease_end

    @property
    def lease_end(self) -> float:
        """When the lease ends, by `clock.steady`; 0 if only the agent can know."""
        return self._values[2]

    @property
    def turns(self) -> float:
        """Turns so far."""
        return self._values[0]

    @property
    def limit_s(self) -> float:
        """How long the agent may go without a turn."""
        return self._values[1]

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._values[1] = max(seconds, SHORTEST_LIMIT_S)


class HangTimer:
    """Measures how long an agent's loop has taken no turn; its guardian calls `update` every `TICK_S`.

    When the machine sleeps or its container is paused, agent and guardian both stop while the clock may go on. So the
    timer counts only time during which the guardian itself was running: an update adds at most two ticks, and an
    agent that wakes up together with its guardian has several ticks to take a turn.
    """

    def __init__(self, turns: float, now: float) -> None:
        self.seconds = 0.0
        self._turns = turns
        self._updated = now

    def update(self, turns: float, now: float) -> None:
        """Takes the agent's turns so far; `now` is in monotonic seconds."""
        passed_s, self._updated = now - self._updated, now
        if turns != self._turns:
            self._turns, self.seconds = turns, 0.0
        else:
            self.seconds += min(passed_s, 2 * TICK_S)

    def restart(self) -> None:
        """Starts counting from zero, because a different limit applies from now on."""
        self.seconds = 0.0
