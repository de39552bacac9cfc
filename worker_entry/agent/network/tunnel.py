"""An agent's side of the process that carries its tasks' connections to and from the other nodes, encrypted."""

from __future__ import annotations

import contextlib
import json
import selectors
import time
from collections.abc import Callable, Mapping
from typing import Optional

from worker_entry.agent.helpers.helper import HelperProcess
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.orders import Start, TunnelKey
from worker_entry.protocol.values import Problem

BEGIN_S = 20.0
"""How long it may take until the tunnel listens; it has to resolve the nodes' names."""


class Tunnel:
    """The tunnel of one attempt. `pids` contains its process, which has to run while the tasks save.

    `note` receives the tunnel's messages about nodes that it cannot reach.
    """

    def __init__(self, selector: selectors.BaseSelector, note: Callable[[str], None]) -> None:
        self._process = HelperProcess(selector, self._take, self._note_end)
        self.pids = self._process.pids
        self._problem = ""
        self._note = note
        self._deadline = 0.0

    def begin(self, order: Start, ports: Mapping[str, int], key: TunnelKey, outer: OuterNetwork) -> None:
        """Starts the tunnel, unless it is running already.

        Args:
            order: has the addresses of all tasks, and the nodes' real hosts.
            ports: those of this node's own tasks, by task.
            key: how the nodes of this attempt recognize each other.
            outer: the network in which the nodes reach each other.
        """
        if self.pids:
            return
        addresses = [
            (f"{kind}:{index}", *address.rpartition(":")[::2])
            for kind, group in order.cluster.items()
            for index, address in enumerate(group)
        ]
        config = {
            "certificate": key.certificate,
            "key": key.key,
            "ports": dict(ports),
            "peers": [
                (task, host, int(port), order.routes[host]) for task, host, port in addresses if host in order.routes
            ],
        }
        self._deadline = time.monotonic() + BEGIN_S
        try:
            with outer.connect() as sockets:
                self._process.start(["tunnel"])
                self._process.write(b"\n", sockets.fileno())
        except OSError as error:
            self._fail(str(error.strerror))
            return
        self._process.write(json.dumps(config).encode() + b"\n")

    def settled(self, now: float) -> bool:
        """Whether the tunnel listens, or there is none; `now`: monotonic seconds."""
        if self._deadline and now >= self._deadline:
            self._fail("it does not answer")
        return not self._deadline

    def take_problem(self) -> Optional[Problem]:
        """Returns and clears the reason that there is no tunnel."""
        problem, self._problem = self._problem, ""
        return Problem("no-tunnel", f"no tunnel to the other nodes: {problem}") if problem else None

    def end(self) -> None:
        """Kills the process and waits until it is gone."""
        self._fail("")

    def _take(self, line: bytes) -> None:
        answer = None
        with contextlib.suppress(ValueError):  # a traceback, for example
            answer = json.loads(line)
        if not isinstance(answer, dict):
            return
        if "note" in answer:
            self._note(answer["note"])
        elif answer["problem"]:
            self._fail(answer["problem"])
        else:
            self._deadline = 0.0

    def _note_end(self, last: bytes) -> None:
        text = last.decode("utf-8", "replace").strip()
        self._fail(f"its process has ended{f': {text}' if text and not text.startswith('{') else ''}")

    def _fail(self, problem: str) -> None:
        self._problem, self._deadline = problem, 0.0
        self._process.end()
