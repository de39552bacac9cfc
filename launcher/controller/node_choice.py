"""Chooses the nodes of the next attempt: without lost nodes, and with nodes that are newly named."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from launcher.console.writer import Console
from launcher.controller.context import AttemptSetup
from launcher.controller.links import NodeLinks
from launcher.gang.checks.findings import SpeedReport
from launcher.gang.checks.preflight import Preflight
from launcher.gang.state import AttemptState
from launcher.plan.planner import Planner
from launcher.transports.base import AgentAddress
from worker_entry.protocol.orders import Goodbye

Relist = Callable[[Planner, Callable[[], bool]], Planner]
"""Takes a run's planner, and a function that says whether the answer is still wanted. Returns a planner for the current
nodes, or the same planner if nothing has changed. May take a minute."""


class NodeChoice:
    """The nodes of one run.

    Args:
        planner: plans for all nodes of the spec.
        links: the links to these nodes.
        console: gets the notes about changes.
        relist: called before each restart to find the current nodes.
        checks: whether nodes are checked before they are used.
    """

    def __init__(
        self,
        planner: Planner,
        links: NodeLinks,
        console: Console,
        relist: Relist,
        *,
        checks: bool,
        examines: bool = False,
    ) -> None:
        self.lost: dict[str, AgentAddress] = {}
        """The lost nodes, and the addresses of their agents."""
        self._planner = planner
        self._links = links
        self._console = console
        self._relist = relist
        self._checks = checks
        self._examines = examines
        self._first: Preflight | None = None

    @property
    def speed(self) -> SpeedReport | None:
        """The result of the speed check; None if no speed check was made, or it has not ended."""
        speed = self._first.speed if self._first is not None else None
        return speed.make_report() if speed is not None and speed.is_over else None

    def choose(self) -> AttemptSetup | None:
        """The setup without lost nodes; None if too few nodes are left."""
        selected = self._planner.select_nodes(self.lost)
        if selected is None:
            return None
        planner, notes = selected
        checks = (
            Preflight(planner.spec, os.urandom(8).hex(), planner.candidates, examines=self._examines)
            if self._checks
            else None
        )
        self._first = self._first or checks
        return AttemptSetup(planner=planner, preflight=checks, notes=notes)

    def choose_again(
        self, chosen: AttemptSetup, state: AttemptState, is_wanted: Callable[[], bool]
    ) -> AttemptSetup | None:
        """The setup after an attempt; None if too few nodes are left.

        Args:
            chosen: the setup for the same nodes.
            state: the end of the attempt.
            is_wanted: whether the run goes on.
        """
        if state.lost:
            self.lost |= {node: self._links.find_agent(node) for node in state.lost}
            self._links.forget(state.lost.keys())
        if state.announced is not None and state.announced.replaced:
            self._leave({state.announced.node}, state.empty)  # frees the node; its replacement may need it
        planner = self._relist(self._planner, is_wanted)
        if planner is self._planner and not state.lost:
            return chosen
        if planner is not self._planner:
            self._leave({node.host for node in self._planner.spec.nodes if node not in planner.spec.nodes}, state.empty)
            self._console.note(f"The nodes are now {', '.join(node.host for node in planner.spec.nodes)}")
        self._planner = planner
        again = self.choose()
        for note in again.notes if again is not None else ():
            self._console.note(note)
        return again

    def take_back(self, nodes: Collection[str], *, proven: Collection[str]) -> None:
        """Makes these lost nodes usable again; `proven`: those on which everything has certainly ended."""
        self.lost = {node: agent for node, agent in self.lost.items() if node not in nodes}
        self._links.clear_fences(proven)

    def find_fences(self) -> dict[str, float]:
        """The nodes whose tasks may still run, and the monotonic time when these tasks have certainly ended."""
        return self._links.fences

    def _leave(self, nodes: Collection[str], empty: Collection[str]) -> None:
        """Closes the links to nodes that the run stops using as before; nodes whose tasks may still run become lost.

        Args:
            nodes: the nodes to leave.
            empty: the nodes on which nothing of the last attempt runs.
        """
        left = self._links.ready.keys() & nodes
        for node in left:
            self._links.send(node, Goodbye())
        self._links.forget(left)
        self._links.clear_fences(empty)
        self.lost |= dict.fromkeys(left & self._links.fences.keys(), AgentAddress())
