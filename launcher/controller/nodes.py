"""The nodes of the next attempt: which take part, how they are reached, and the waits for lost ones.

During a wait, the links are still read, and a signal ends the wait. Messages read during a wait are kept for the next
attempt, except for reports of the last attempt's tasks.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from launcher.clock import Timing
from launcher.console.writer import Console
from launcher.controller.attempt import IDLE_S
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.links import Incoming, NodeLinks
from launcher.gang.checks.findings import SpeedReport
from launcher.gang.checks.preflight import Preflight
from launcher.gang.events import EndAnnounced, FilesAsked, ProfileAsked, StacksAsked
from launcher.gang.state import AttemptState
from launcher.plan.planner import Planner
from launcher.plan.rendering import render_spec
from launcher.report.run_events import NodeMet
from launcher.rundir.directory import RunDir
from launcher.spec.models import ClusterSpec
from launcher.transports.base import AgentAddress, LinkClosed, LinkNews, Transport
from launcher.transports.node_cleanup import clean_node
from launcher.transports.targets import Targets, find_addresses, find_targets, make_transport
from launcher.verdict.models import Verdict
from launcher.wording import render_duration
from worker_entry.protocol.messages import Message, Ready, Signalled
from worker_entry.protocol.orders import Goodbye

Relist = Callable[[Planner, Callable[[], bool]], Planner]
"""Takes a run's planner, and a function that says whether the answer is still wanted. Returns a planner for the current
nodes, or the same planner if nothing has changed. May take a minute."""
KEPT = (LinkClosed, Signalled, EndAnnounced, StacksAsked, ProfileAsked, FilesAsked)
POLL_S = 2.0
"""How often to try to reach a lost node."""


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
            is_wanted: whether the run continues.
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
        left = sorted(self._links.ready.keys() & nodes)
        for node in left:
            self._links.send(node, Goodbye())
        self._links.forget(left)
        self._links.clear_fences(empty)
        self.lost |= {node: AgentAddress() for node in left if node in self._links.fences}


def make_transports(spec: ClusterSpec, targets: Targets, files: RunDir, run_id: str) -> dict[str, Transport]:
    """The transports to all nodes of a spec, by host."""
    return {node.host: make_transport(spec, node, targets[node.host], files, run_id) for node in spec.nodes}


@dataclass
class Recovery:
    """A function that stops a run's leftover processes on a lost node (see `Recover`)."""

    spec: ClusterSpec
    """The spec of the last attempt."""
    run_id: str

    def __call__(self, host: str, agent: AgentAddress) -> Recovered:
        node = next(node for node in self.spec.nodes if node.host == host)
        cleaned = clean_node(self.spec, node, [self.run_id], agent)
        if cleaned.unproven:
            return Recovered.UNPROVEN
        return Recovered.YES if cleaned.ok and not cleaned.gone else Recovered.NO


@dataclass(frozen=True)
class Relisting:
    """A function that asks the spec's source for the current nodes, and prepares their connectors."""

    context: RunContext
    recovery: Recovery

    def __call__(self, planner: Planner, is_wanted: Callable[[], bool]) -> Planner:
        spec = self.context.source.find(planner.spec, is_wanted, self.context.console.note)
        if spec.nodes == planner.spec.nodes:
            return planner
        targets, files = find_targets(spec), self.context.files
        self.context.links.add(make_transports(spec, targets, files, self.context.run_id))
        self.recovery.spec = spec
        files.write_text(files.spec, render_spec(spec))
        return replace(planner, spec=spec, reached=find_addresses(spec, targets))


class Pauses:
    """The waits of one run.

    Args:
        context: the context of the run.
        nodes: knows which nodes are lost.
        recover: cleans a lost node; returns whether the node can be used again.
        is_wanted: whether the run continues; if not, every wait ends.
    """

    def __init__(self, context: RunContext, nodes: NodeChoice, recover: Recover, is_wanted: Callable[[], bool]) -> None:
        self._context = context
        self._timing = context.timing
        self._nodes = nodes
        self._recover = recover
        self._is_wanted = is_wanted
        self._kept: list[Incoming] = []
        """Messages and events read during waits, for the next attempt."""

    @property
    def announced(self) -> EndAnnounced | None:
        """The announced end of all nodes, if the engine has announced it during a wait."""
        ends = [event for event in self._kept if isinstance(event, EndAnnounced) and event.reference]
        return next((end for end in ends if not end.stays and not end.replaced), None)

    def hand_over(self) -> None:
        """Passes what `pause` has kept to the next attempt, so that it sees losses, announcements and requests."""
        for incoming in self._kept:
            self._context.links.put(incoming)
        self._kept = []

    def fence(self, why: Verdict) -> None:
        """Waits until the tasks of lost nodes have certainly ended; otherwise, two chiefs could write one checkpoint.

        Args:
            why: the verdict on the last attempt.
        """
        now = self._timing.monotonic()
        fences = {node: until for node, until in self._nodes.find_fences().items() if until > now}
        wait_s = max(fences.values(), default=now) - now
        if wait_s > 0:
            names = ", ".join(sorted(fences))
            self._note_state(why)
            self._context.console.note(
                f"Tasks may still run on {names}; waiting {wait_s:.0f} s until they have certainly ended"
            )
            self.pause(wait_s)

    def await_return(self, limit_s: float, why: Verdict) -> AttemptSetup | None:
        """Waits for lost nodes; returns a setup that includes them, None after the time limit or a signal."""
        names = ", ".join(sorted(self._nodes.lost))
        self._note_state(why)
        self._context.console.note(f"No spare node is left; waiting up to {limit_s:g} s for {names} to come back")
        started = self._timing.monotonic()
        watch, chosen = ReturnWatch(self._nodes.lost, self._recover, self._timing), None
        while chosen is None and self._goes_on() and self._timing.monotonic() < started + limit_s:
            self.pause(IDLE_S)
            self._nodes.take_back(watch.back, proven=watch.proven)
            chosen = self._nodes.choose()
        watch.close()
        if chosen is not None:
            self._context.console.note(
                f"{', '.join(sorted(watch.back))}: back after {render_duration(self._timing.monotonic() - started)}"
            )
        return chosen

    def pause(self, seconds: float) -> None:
        """Waits this long and reads the links; returns early if the run is not wanted, or loses all of its nodes."""
        until = self._timing.monotonic() + seconds
        while self._goes_on() and (left_s := until - self._timing.monotonic()) > 0:
            self._context.journal.touch()
            incoming = self._context.links.next(min(left_s, IDLE_S))
            if isinstance(incoming, tuple):
                self._context.collector.note(*incoming)
                self._note_met(*incoming)
            if isinstance(incoming[1] if isinstance(incoming, tuple) else incoming, KEPT):
                assert incoming is not None
                self._kept.append(incoming)

    def _note_met(self, node: str, message: Message | LinkNews) -> None:
        """Records a node that answers only now: the next attempt does not ask it again, and may be taken over."""
        if isinstance(message, Ready):
            self._context.journal.write(NodeMet(node, message))

    def _goes_on(self) -> bool:
        return self._is_wanted() and self.announced is None

    def _note_state(self, why: Verdict) -> None:
        self._context.journal.note_state("waiting", why.reference, why.message)


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
        """The nodes on which the last agent and all processes below it have certainly ended."""
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
