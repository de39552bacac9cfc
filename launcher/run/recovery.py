"""Waits for lost nodes to come back, for example after a reboot or in a new container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from launcher.run.timing import Timing

POLL_S = 2.0

Recover = Callable[[str, str], bool]
"""Takes a node and its last agent's reattach folder. Returns whether the node can be reached again, and that agent and
all processes below it have ended. May take a minute."""


class ReturnWatch:
    """A watch that polls each node separately until `close`; `nodes`: the reattach folders of their last agents."""

    def __init__(self, nodes: Mapping[str, str], recover: Recover, timing: Timing) -> None:
        self._recover = recover
        self._back: set[str] = set()
        self._ends = [timing.repeat(partial(self._poll, *node), POLL_S) for node in nodes.items()]

    @property
    def back(self) -> frozenset[str]:
        """The nodes that have come back so far."""
        return frozenset(self._back)

    def close(self) -> None:
        for end in self._ends:
            end()

    def _poll(self, node: str, reattach_folder: str) -> bool:
        if self._recover(node, reattach_folder):
            self._back.add(node)
        return node in self._back
