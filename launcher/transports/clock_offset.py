"""Estimates how far a node's clock is off, from the answers to the controller's heartbeats."""

from __future__ import annotations

from collections import deque

from worker_entry.protocol.orders import Beat
from worker_entry.system import clock

SAMPLES = 30
"""Answered heartbeats that are kept; the fastest answer counts."""


class ClockOffset:
    """The clock offset of one node, from its heartbeats."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def note(self, beat: Beat) -> None:
        if beat.echo is not None:
            now = clock.now()
            self._samples.append((now - beat.echo, beat.time - (beat.echo + now) / 2))

    @property
    def offset_s(self) -> float:
        """The node's clock minus the controller's; 0 before the first answer."""
        return min(self._samples, default=(0.0, 0.0))[1]
