"""Waits for lost nodes to come back, for example after a reboot or in a new container."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial

from launcher.clock import Timing
from launcher.transports.base import AgentAddress

POLL_S = 2.0


class Recovered(enum.Enum):
    """Whether a lost node can be used again."""

    NO = enum.auto()
    UNPROVEN = enum.auto()
    """Yes, but nothing proves that its last agent has ended; only the end of the lease will."""
    YES = enum.auto()


Recover = Callable[[str, AgentAddress], Recovered]
"""Takes a node and the address of its last agent. May take a minute."""


class ReturnWatch:
    """A watch that polls each node separately until `close`; `nodes`: the addresses of their last agents."""

    def __init__(self, nodes: Mapping[str, AgentAddress], recover: Recover, timing: Timing) -> None:
        self._recover = recover
        self._back: set[str] = set()
        self._proven: set[str] = set()
        self._ends = [timing.repeat(partial(self._poll, *node), POLL_S) for node in nodes.items()]

    @property
    def back(self) -> frozenset[str]:
        """The nodes that have come back so far."""
        return frozenset(self._back)

    @property
    def proven(self) -> frozenset[str]:
        """Those on which the last agent and all processes below it have certainly ended."""
        return frozenset(self._proven)

    def close(self) -> None:
        for end in self._ends:
            end()

    def _poll(self, node: str, agent: AgentAddress) -> bool:
        recovered = self._recover(node, agent)
        if recovered is Recovered.YES:
            self._proven.add(node)
        if recovered is not Recovered.NO:
            self._back.add(node)
        return node in self._back
