"""How long an agent goes on without knowing that its controller hears it.

The controller gives a node up when it has heard nothing for the lease, and may then start the same tasks elsewhere. So
the agent must not go by what it hears: it may be heard no more. It stamps its answer to each beat, and the controller
sends the last stamp that it has got with its next beat. The lease runs from the moment of that stamp, which is before
the moment at which the controller has heard the agent last.

On another machine than the controller's, time counts during which the machine sleeps: the controller does not sleep.
On the controller's own it does not count: both sleep.
"""

from __future__ import annotations

import time
from typing import Optional

from worker_entry.system import clock

LONGEST_TURN_S = 2.0
"""More than so long between two turns, an agent was not running."""
GRACE_S = 2.0
"""From TERM to KILL, when the lease is over."""
HANG_S = 6.0
"""So long after the end of its lease an agent that is still there hangs; its guardian kills all that is below it."""
MARGIN_S = 10.0
"""So long after the end of the lease nothing of a run is left on a node, whatever its agent does."""


class Lease:
    """An agent's lease.

    Args:
        seconds: how long it is.
        far: whether the controller is on another machine.
    """

    def __init__(self, seconds: float, *, far: bool) -> None:
        self.seconds = seconds
        self._far = far
        self._looked = time.monotonic()
        self._awake_s = 0.0
        self._confirmed = self.stamp()

    def stamp(self) -> float:
        """What an answer to a beat says: the time by the lease's own clock."""
        if self._far:
            return clock.now()
        passed_s, self._looked = time.monotonic() - self._looked, time.monotonic()
        self._awake_s += min(passed_s, LONGEST_TURN_S)
        return self._awake_s

    def confirm(self, stamp: Optional[float]) -> None:
        """The controller has got the answer with this stamp; None: none yet."""
        if stamp is not None and self._confirmed < stamp <= self.stamp():
            self._confirmed = stamp

    @property
    def end(self) -> float:
        """When it is over, as a guardian can know it; 0 where only the agent can."""
        return self._confirmed + self.seconds if self._far else 0.0

    @property
    def overdue_s(self) -> float:
        """Seconds since its end; negative before."""
        return self.stamp() - self._confirmed - self.seconds
