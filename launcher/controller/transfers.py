"""How far the program's folder has been sent to each node."""

from __future__ import annotations

from collections import deque

from launcher.wording import render_duration
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Fetch
from worker_entry.protocol.units import render_size

WINDOW_S = 10.0
"""The rate is that of the last WINDOW_S seconds."""
SHOWN_NODES = 4


@dataclass(frozen=True)
class Transfer:
    """One node's part: bytes sent, bytes in all, and bytes per second, 0 if unknown."""

    sent: int
    total: int
    rate: float

    def __str__(self) -> str:
        left_s = f", {render_duration((self.total - self.sent) / self.rate)} left" if self.rate else ""
        rate = f", {render_size(self.rate)}/s" if self.rate else ""
        return f"{render_size(self.sent)} of {render_size(self.total)}{rate}{left_s}"


class Transfers:
    """The transfers of one attempt, from the nodes' requests."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def note(self, node: str, fetch: Fetch, now: float) -> None:
        """Notes a request; `now`: monotonic seconds."""
        total = self._totals.setdefault(node, fetch.left)
        samples = self._samples.setdefault(node, deque())
        samples.append((now, max(total - fetch.left, 0)))
        while samples[0][0] < now - WINDOW_S and len(samples) > 2:
            samples.popleft()

    def end(self, node: str) -> None:
        """Forgets a node that has all files."""
        self._totals.pop(node, None)

    @property
    def current(self) -> dict[str, Transfer]:
        """The unfinished transfers, by node."""
        return {node: self._make(node, total) for node, total in self._totals.items()}

    def render(self) -> str:
        """`gpu-a 120 MiB of 300 MiB, 24 MiB/s, 7.5 s left; gpu-b …`, the slowest first; empty if there is none."""
        current = sorted(self.current.items(), key=lambda item: item[1].sent / max(item[1].total, 1))
        shown = [f"{node} {transfer}" for node, transfer in current[:SHOWN_NODES]]
        more = [f"and {len(current) - SHOWN_NODES} more"] if len(current) > SHOWN_NODES else []
        return "; ".join([*shown, *more])

    def _make(self, node: str, total: int) -> Transfer:
        samples = self._samples[node]
        (first, before), (last, sent) = samples[0], samples[-1]
        return Transfer(sent, total, (sent - before) / (last - first) if last > first else 0.0)
