"""Waits for lost nodes to come back, for example after a reboot or in a new container."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from launcher.plan.planner import Planner
from launcher.run.node_links import NodeLinks
from launcher.run.timing import Timing
from launcher.spec.models import NodeSpec

POLL_S = 2.0

Recover = Callable[[str, str], bool]
"""Takes a node and its last agent's reattach folder. Returns whether the node can be reached again, and that agent and
all processes below it have ended. May take a minute."""

Relist = Callable[[Planner, Callable[[], bool]], Planner]
"""Takes a run's planner, and a function that says whether the answer is still wanted. Returns a planner for the nodes
that there are now, or the same planner if nothing has changed. May take a minute."""


def leave_nodes(links: NodeLinks, earlier: Sequence[NodeSpec], now: Sequence[NodeSpec]) -> dict[str, str]:
    """Closes the links to nodes that are not used as they were; returns the nodes whose tasks may still run, as lost
    ones without a reattach folder."""
    left = {node.host for node in earlier if node not in now and node.host in links.ready}
    links.forget(left)
    return dict.fromkeys(left & links.fences.keys(), "")


class ReturnWatch:
    """Polls nodes, each by itself, until `close`; `nodes`: the reattach folders of their last agents."""

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
