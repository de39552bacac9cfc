"""How a guardian knows that its agent is at work: memory that both share, where the agent counts its turns.

Memory, not a pipe: to count costs the agent no system call, never blocks it, and wakes nobody up.
"""

from __future__ import annotations

import mmap

TICK_S = 1.0
"""How often a guardian looks."""
SHORTEST_LIMIT_S = 5.0
"""A slow disk may block a healthy agent for some seconds, however short the lease is."""


class Turns:
    """The turns of one agent's loop; made before the fork, `count` is called by the agent."""

    def __init__(self, limit_s: float) -> None:
        self._values = memoryview(mmap.mmap(-1, 24)).cast("d")
        self.limit_s = limit_s

    def count(self, lease_end: float) -> None:
        """The agent has taken a turn, and knows of this end of its lease, by the clock of that."""
        self._values[0] += 1.0
        self._values[2] = lease_end

    @property
    def lease_end(self) -> float:
        """By `clock`; 0 where only the agent knows it."""
        return self._values[2]

    @property
    def number(self) -> float:
        return self._values[0]

    @property
    def limit_s(self) -> float:
        """How long the agent may go without a turn."""
        return self._values[1]

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._values[1] = max(seconds, SHORTEST_LIMIT_S)


class Silence:
    """How long an agent has not taken a turn, as a guardian sees it that looks every `TICK_S`.

    A machine that sleeps, and a container that is paused, stop both of them, and the clock may go on. So it is not the
    clock that counts, but the time during which the guardian itself was running: a look adds two ticks at the most, and
    an agent that wakes up together with its guardian has several ticks to take a turn.
    """

    def __init__(self, number: float, now: float) -> None:
        self.seconds = 0.0
        self._number = number
        self._looked = now

    def look(self, number: float, now: float) -> None:
        """Notes the number of turns that the agent has taken by now, in monotonic seconds."""
        passed_s, self._looked = now - self._looked, now
        if number != self._number:
            self._number, self.seconds = number, 0.0
        else:
            self.seconds += min(passed_s, 2 * TICK_S)

    def forgive(self) -> None:
        """Begins anew, because something else is asked of the agent from now on."""
        self.seconds = 0.0
