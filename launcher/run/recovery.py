"""Waits for lost nodes to come back: a machine that starts again, a container that is made anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from launcher.run.timing import Timing

LOOK_S = 2.0

Recover = Callable[[str, str], bool]
"""Whether a node can be reached again, and its last agent, which had this meeting place, and all below it have ended.
May take a minute."""


class ReturnWatch:
    """Looks after some nodes, given with the meeting places of their last agents, each by itself, until `close`."""

    def __init__(self, nodes: Mapping[str, str], recover: Recover, timing: Timing) -> None:
        self._recover = recover
        self._back: set[str] = set()
        self._ends = [timing.repeat(partial(self._look_after, *node), LOOK_S) for node in nodes.items()]

    @property
    def back(self) -> frozenset[str]:
        """The nodes that have come back so far."""
        return frozenset(self._back)

    def close(self) -> None:
        for end in self._ends:
            end()

    def _look_after(self, node: str, reattach_folder: str) -> bool:
        if self._recover(node, reattach_folder):
            self._back.add(node)
        return node in self._back
