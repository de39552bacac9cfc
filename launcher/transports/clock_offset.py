"""How far a node's clock is off, as the answers to our beats show."""

from __future__ import annotations

from collections import deque

from worker_entry.protocol.orders import Beat
from worker_entry.system import clock

SAMPLES = 30
"""Answered beats that are kept; the fastest counts."""


class ClockOffset:
    """Takes the beats of one node."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def note(self, beat: Beat) -> None:
        if beat.echo is not None:
            now = clock.now()
            self._samples.append((now - beat.echo, beat.time - (beat.echo + now) / 2))

    @property
    def offset_s(self) -> float:
        """The node's clock minus ours; 0 before the first answer."""
        return min(self._samples, default=(0.0, 0.0))[1]
