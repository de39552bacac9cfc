"""The links to all nodes of a run, and the one queue into which everything goes that happens to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.events import Event
from launcher.plan import NodeFacts
from launcher.run_dir import RunDir
from launcher.tasks import parse_task_id
from launcher.transports.base import Link, LinkClosed, LinkNews, LogMirror, Transport
from worker_entry.messages import Message, Ready
from worker_entry.orders import VERSION, Goodbye, Hello

NODE_FILES = "~/.local/state/distlaunch/nodes"
"""Where an agent on another machine keeps a run's logs, in the home folder there."""
CLOSING_AT_ONCE = 64
HURRIED_SILENCE_S = 5.0
"""How long an agent may be silent when the run is to end: more than twice as long as it takes to answer a beat."""
LOOK_S = 0.25
QUEUE_LIMIT = 10_000
"""Waiting events above which links are not read further."""

Happening = tuple[str, Message | LinkNews] | Event
"""What a node has said, or what we have found ourselves."""


class NodeLinks:
    """At most one link to each node; `transports` has the way to each of them."""

    def __init__(self, transports: Mapping[str, Transport], run_id: str, run_dir: RunDir, lease_s: float) -> None:
        self.ready: dict[str, Ready] = {}
        """What the nodes that have answered have said of themselves."""
        self._transports = transports
        self._run_id = run_id
        self._run_dir = run_dir
        self._lease_s = lease_s
        self._mirror = LogMirror(lambda attempt, task: run_dir.log(attempt, parse_task_id(task)))
        self._links: dict[str, Link] = {}
        self._left: dict[str, int | None] = {}
        """What is left on nodes that were lost."""
        self._serials: dict[str, int] = {}
        """Which link to a node it is; what comes from an older one is not for us."""
        self._queue: queue.SimpleQueue[tuple[int, Happening]] = queue.SimpleQueue()
        self._hurries = threading.Event()
        self._closed = threading.Event()

    @property
    def far(self) -> frozenset[str]:
        """The nodes that do not share our files."""
        return frozenset(node for node, way in self._transports.items() if not way.shares_files)

    def connect(self, node: str, directory: str) -> None:
        """Begins to start the node's agent, whose tasks run in `directory`; what comes of it is put into the queue."""
        transport = self._transports[node]
        serial = self._serials[node] = self._serials.get(node, 0) + 1

        def deliver(node: str, message: Message | LinkNews) -> None:
            while self._queue.qsize() > QUEUE_LIMIT:
                time.sleep(0.01)  # a link's thread waits here, and behind it the agent, on its disk
            self._queue.put((serial, (node, message)))

        try:
            link = transport.connect(node, deliver, self._mirror, self._lease_s)
        except OSError as error:
            self.put((node, LinkClosed(f"cannot start {error.filename or 'the agent'}: {error.strerror}")))
            return
        self._links[node] = link
        link.send(
            Hello(
                version=VERSION,
                run_id=self._run_id,
                directory=str(self._run_dir.root if transport.shares_files else Path(NODE_FILES, self._run_id)),
                cwd=directory,
                lease_s=self._lease_s,
                stream_logs=not transport.shares_files,
            )
        )

    def forget(self, nodes: Collection[str]) -> None:
        """Closes the links to nodes that were lost; what they may yet say is not heard any more."""
        gone = {node: self._links.pop(node) for node in nodes if node in self._links}
        for node in nodes:
            self.ready.pop(node, None)
            self._serials[node] = self._serials.get(node, 0) + 1
        with ThreadPoolExecutor(max_workers=CLOSING_AT_ONCE) as pool:
            self._left.update(zip(gone, pool.map(lambda link: link.close(), gone.values()), strict=True))

    def put(self, happening: Happening) -> None:
        self._queue.put((0, happening))

    def next(self, timeout_s: float) -> Happening | None:
        """What comes next; None if nothing does in time."""
        try:
            serial, happening = self._queue.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if serial and isinstance(happening, tuple) and serial != self._serials[happening[0]]:
            return self.next(0.0)
        if isinstance(happening, tuple) and isinstance(happening[1], Ready):
            self.ready[happening[0]] = happening[1]
        return happening

    def send(self, node: str, message: Message, body: bytes = b"") -> None:
        if node in self._links:
            self._links[node].send(message, body)

    def hurry(self) -> None:
        """The run is to end: an agent that hangs, or cannot be reached, is not waited for until its lease is over."""
        if not self._hurries.is_set():
            self._hurries.set()
            threading.Thread(target=self._drop_silent, name="hurry", daemon=True).start()

    def _drop_silent(self) -> None:
        while not self._closed.wait(LOOK_S):
            for link in list(self._links.values()):
                link.drop_if_silent(HURRIED_SILENCE_S)

    def clock_offset_s(self, node: str) -> float:
        return self._links[node].clock_offset_s if node in self._links else 0.0

    def facts(self) -> dict[str, NodeFacts]:
        return {node: NodeFacts(ready.cores, tuple(ready.gpus)) for node, ready in self.ready.items()}

    def close(self) -> dict[str, int | None]:
        """Ends every agent; returns how many processes are left on each node, None where that is unknown."""
        self.hurry()
        for link in self._links.values():
            link.send(Goodbye())
        # This machine last: closing its link ends all that is left below us, ways to other machines included.
        here = [node for node in self._links if self._transports[node].shares_files]
        others = [node for node in self._links if node not in here]
        with ThreadPoolExecutor(max_workers=CLOSING_AT_ONCE) as pool:
            left = dict(zip(others, pool.map(lambda node: self._links[node].close(), others), strict=True))
        left |= {node: self._links[node].close() for node in here}
        self._closed.set()
        self._mirror.close()
        return self._left | left
