"""The agent counts the turns of its loop in memory that it shares with its guardian; so the guardian notices a hang.

Memory rather than a pipe: counting costs the agent no system call, never blocks it, and never wakes the guardian.
"""

from __future__ import annotations

import mmap

TICK_S = 1.0
"""How often the guardian checks."""
SHORTEST_LIMIT_S = 5.0
"""A slow disk may block a healthy agent for some seconds, however short the lease is."""


class LoopCounter:
    """Counts the turns of an agent's loop. The guardian makes it before it forks; the agent calls `advance`."""

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
    """How long an agent has taken no turn, as seen by a guardian that calls `update` every `TICK_S`.

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
