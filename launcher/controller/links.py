"""The links to all nodes of a run, and the one queue for all of its events."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from launcher.clock import SystemTiming, Timing
from launcher.controller.task_input import InputArrived
from launcher.errors import ProcessLimitError, as_ours
from launcher.gang.events import Event
from launcher.plan.resources import NodeFacts
from launcher.rundir.directory import RunDir
from launcher.tasks import TaskId, parse_task_id
from launcher.transports.base import (
    AgentAddress,
    Link,
    LinkClosed,
    LinkDropped,
    LinkError,
    LinkNews,
    LinkResumed,
    Resumption,
    Transport,
)
from launcher.transports.incoming import Inbox, Placement, Received
from launcher.transports.log_mirror import LogMirror
from worker_entry.agent.connection.lease import MARGIN_S
from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.messages import KeptWarm, Message, Ready
from worker_entry.protocol.orders import VERSION, Goodbye, Hello

NODE_FILES = "~/.local/state/distlaunch/nodes"
"""Where an agent on another machine keeps a run's logs."""
CLOSING_AT_ONCE = 64
SILENT_S = 10.0
"""An agent counts as silent after this time: several heartbeats."""
HURRIED_SILENCE_S = 5.0
"""How long an agent may be silent while the run stops: more than two heartbeats."""
POLL_S = 0.25
"""How often to look for silent agents while the run stops."""

Incoming = tuple[str, Message | LinkNews] | Event | InputArrived
"""A node's message, or an event of our own."""


class NodeLinks:
    """The links of a run, at most one to each node.

    `transports`: how each node is reached. `sample_s`: how often agents measure the resource use of tasks; 0: never.
    `isolated`: whether agents and tasks run in a separate network. `keep_warm_s`: how long warm state stays on the
    nodes for the next run.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        run_id: str,
        run_dir: RunDir,
        lease_s: float,
        timing: Timing | None = None,
        *,
        sample_s: float = 0.0,
        isolated: bool = False,
        keep_warm_s: float = 0.0,
    ) -> None:
        self.timing = timing or SystemTiming()
        self.ready: dict[str, Ready] = {}
        """The first answer of each connected node."""
        self._fresh: set[str] = set()
        """The nodes with a new agent, until `take_fresh` returns them."""
        self.claimed: Mapping[str, tuple[str, ...]] = {}
        """The GPUs that each node keeps for the run, if the run has waited for them."""
        self._transports = {**transports}
        self._run_id = run_id
        self._run_dir = run_dir
        self._lease_s = lease_s
        self._sample_s = sample_s
        self._isolated = isolated
        self._keep_warm_s = keep_warm_s
        self.kept: dict[str, KeptWarm] = {}
        """The warm state that stays on each node for the next run; set by `close`."""
        self.store: Callable[[str, FileRead, bytes], None] = lambda _node, _part, _data: None
        """Takes parts of files that were asked for; called from the links' threads."""
        self._mirror = LogMirror(lambda attempt, task: run_dir.log(attempt, parse_task_id(task)))
        self._links: dict[str, Link] = {}
        self._left: dict[str, int | None] = {}
        """The number of processes left on each lost node; None if unknown."""
        self.fences: dict[str, float] = {}
        """When the tasks of lost nodes have certainly ended, in monotonic seconds."""
        self._inboxes: dict[str, Inbox] = {}
        """The inboxes of current links; messages from older ones are dropped."""
        self.unheard: set[str] = set()
        """The nodes whose connection is broken, as far as `next` has told."""
        self._placement = Placement()
        self._queue: queue.SimpleQueue[Received | Incoming] = queue.SimpleQueue()
        self._handling: Received | None = None
        """The item that `next` returned last."""
        self._end_hurry: Callable[[], None] | None = None

    @property
    def far(self) -> frozenset[str]:
        """The nodes that do not share our files."""
        return frozenset(node for node, transport in self._transports.items() if not transport.shares_files)

    def add(self, transports: Mapping[str, Transport]) -> None:
        """Adds or replaces transports; they apply to nodes that are not connected."""
        self._transports |= transports

    def begin(self, attempt: int, nodes: Mapping[str, Collection[TaskId]]) -> None:
        """Begins an attempt: from now on, each node may report only its tasks of this attempt. A hurry ends."""
        self._relax()
        self._placement = Placement.of(attempt, nodes)
        self._mirror.begin(attempt)

    def connect(self, node: str, directory: str) -> None:
        """Starts the node's agent, whose tasks run in `directory`; the result goes into the queue."""
        self._open(node, None)
        shares_files = self._transports[node].shares_files
        self.send(
            node,
            Hello(
                version=VERSION,
                run_id=self._run_id,
                directory=str(self._run_dir.root if shares_files else Path(NODE_FILES, self._run_id)),
                cwd=directory,
                lease_s=self._lease_s,
                stream_logs=not shares_files,
                sample_s=self._sample_s,
                isolated=self._isolated,
            ),
        )

    def end_unanswered(self) -> None:
        """Closes the links to nodes whose agents have not answered Hello; nothing was started there."""
        self._end(sorted(self._links.keys() - self.ready.keys()))

    def resume(self, node: str, resumption: Resumption) -> None:
        """Takes over the node's agent from an earlier controller; call it after `begin`. Queues the result."""
        if resumption.ready is not None:
            self.ready[node] = resumption.ready
        self._open(node, resumption)

    def _open(self, node: str, resumption: Resumption | None) -> None:
        self._close_inbox(node)
        inbox = self._inboxes[node] = Inbox(
            node, lambda: self._placement, self._mirror, self._queue.put, self.timing, store=self.store
        )
        try:
            link = self._transports[node].connect(node, inbox.deliver, inbox, self._lease_s, resumption)
        except (OSError, ProcessLimitError, LinkError) as error:
            self._links.pop(node, None)
            self.put((node, LinkClosed(_render_failure(error))))
            return
        self._links[node] = link
        inbox.confirm = link.confirm

    def forget(self, nodes: Collection[str]) -> None:
        """Closes the links to lost nodes; their later messages are dropped."""
        for node, (link, left) in self._end(nodes).items():
            self._left[node] = left
            if left is None:
                self.fences[node] = link.last_heard + self._lease_s + MARGIN_S
            else:
                self.fences.pop(node, None)

    def _end(self, nodes: Collection[str]) -> dict[str, tuple[Link, int | None]]:
        """Closes the links to these nodes; returns each link, and how many processes are left there."""
        gone = {node: self._links.pop(node) for node in nodes if node in self._links}
        for node in nodes:
            self.ready.pop(node, None)
            self._fresh.discard(node)
            self.unheard.discard(node)
            self._close_inbox(node)
        left = self.timing.map(lambda link: link.close(), gone.values(), CLOSING_AT_ONCE)
        return dict(zip(gone, zip(gone.values(), left, strict=True), strict=True))

    def clear_fences(self, nodes: Collection[str]) -> None:
        """Removes the fences of nodes on which nothing of the last attempt runs."""
        for node in nodes:
            self.fences.pop(node, None)

    def give_up(self, nodes: Collection[str]) -> None:
        """Drops the links to lost nodes whose leftover processes another party stops."""
        for node in sorted(self._links.keys() & {*nodes}):
            self._close_inbox(node)
            self._links.pop(node).abandon()
            self._left[node] = None

    def _close_inbox(self, node: str) -> None:
        inbox = self._inboxes.pop(node, None)
        if inbox is not None:
            inbox.close()

    def put(self, incoming: Incoming) -> None:
        self._queue.put(incoming)

    def next(self, timeout_s: float) -> Incoming | None:
        """Returns the next item; None after the timeout. The item returned before then counts as handled."""
        if self._handling is not None:
            self._handling.inbox.settle(self._handling)
            self._handling = None
        try:
            arrived = self.timing.wait(self._queue, timeout_s)
            while isinstance(arrived, Received):
                arrived.inbox.release(arrived)
                if arrived.inbox is self._inboxes.get(arrived.inbox.node) and not arrived.is_late:
                    self._note(arrived.inbox.node, arrived.message)
                    self._handling = arrived
                    return arrived.inbox.node, arrived.message
                arrived.inbox.settle(arrived)
                arrived = self._queue.get_nowait()
        except queue.Empty:
            return None
        return arrived

    def _note(self, node: str, message: Message | LinkNews) -> None:
        if isinstance(message, Ready):
            if node not in self.ready:
                self._fresh.add(node)
            self.ready[node] = message
        elif isinstance(message, LinkDropped):
            self.unheard.add(node)
        elif isinstance(message, (LinkResumed, LinkClosed)):
            self.unheard.discard(node)

    def take_fresh(self, nodes: Collection[str]) -> list[str]:
        """Returns the nodes whose agents are new, each agent once; it may have answered between two attempts."""
        fresh = sorted(self._fresh.intersection(nodes))
        self._fresh.difference_update(fresh)
        return fresh

    @property
    def frame(self) -> int:
        """The agent's number of the frame that `next` returned last; 0 if that item was not a frame."""
        return self._handling.frame if self._handling is not None else 0

    def send(self, node: str, message: Message, body: bytes = b"") -> None:
        """Sends the message if the node is connected; any thread may call it."""
        link = self._links.get(node)
        if link is not None:
            link.send(message, body)

    def is_heard(self, node: str) -> bool:
        """Whether the node's agent has answered Hello and is not silent; any thread may call it."""
        link = self._links.get(node)
        silent_s = self.timing.monotonic() - link.last_heard if link is not None else 0.0
        return link is not None and node in self.ready and silent_s < SILENT_S

    def hurry(self) -> None:
        """Drops agents that hang or cannot be reached, instead of waiting until their leases expire."""
        if self._end_hurry is None:
            self._end_hurry = self.timing.repeat(self._drop_silent, POLL_S, POLL_S)

    def _relax(self) -> None:
        """Ends the hurry."""
        if self._end_hurry is not None:
            self._end_hurry()
            self._end_hurry = None

    def _drop_silent(self) -> bool:
        for link in list(self._links.values()):
            link.drop_if_silent(HURRIED_SILENCE_S)
        return False

    def clock_offset_s(self, node: str) -> float:
        return self._links[node].clock_offset_s if node in self._links else 0.0

    def facts(self) -> dict[str, NodeFacts]:
        return {node: self.facts_of(node) for node in self.ready}

    def facts_of(self, node: str) -> NodeFacts:
        """The facts that a ready node has reported."""
        return NodeFacts.of(self.ready[node], self.claimed.get(node))

    def find_agent(self, node: str) -> AgentAddress:
        """The address at which a later connection finds the node's agent."""
        ready = self.ready.get(node)
        return AgentAddress(ready.reattach_folder or "", ready.process_view) if ready is not None else AgentAddress()

    def abandon(self) -> None:
        """Closes all links and sends nothing to the agents."""
        for node, link in self._links.items():
            self._close_inbox(node)
            link.abandon()
        self._mirror.close()

    def close(self) -> dict[str, int | None]:
        """Stops every agent; returns the number of processes left on each node, None if unknown."""
        self.hurry()
        for node, link in self._links.items():
            self._close_inbox(node)
            link.send(Goodbye(self._keep_warm_s))
        # This machine last: closing its link kills all of our descendants, including proxies to other machines.
        here = [node for node in self._links if self._transports[node].shares_files]
        others = [node for node in self._links if node not in here]
        ends = self.timing.map(lambda node: self._links[node].close(), others, CLOSING_AT_ONCE)
        left = dict(zip(others, ends, strict=True))
        left |= {node: self._links[node].close() for node in here}
        self.kept = {node: link.kept for node, link in self._links.items() if link.kept is not None}
        self._relax()
        self._mirror.close()
        return self._left | left


def _render_failure(error: OSError | ProcessLimitError | LinkError) -> str:
    ours = as_ours(error)
    if isinstance(ours, OSError):
        return f"cannot start {ours.filename or 'the agent'}: {ours.strerror}"
    return ours.sentence if isinstance(ours, ProcessLimitError) else str(ours)
