"""An agent's side of the process that carries its tasks' connections to and from the other nodes, encrypted."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Optional

from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.orders import Start, TunnelKey
from worker_entry.protocol.values import Problem
from worker_entry.system import processes

BEGIN_S = 20.0
"""How long it may take until the tunnel listens; it has to resolve the nodes' names."""


class Tunnel:
    """The tunnel of one attempt. `pids` contains its process, which has to run while the tasks save.

    `note` receives the tunnel's messages about nodes that it cannot reach.
    """

    def __init__(self, selector: selectors.BaseSelector, note: Callable[[str], None]) -> None:
        self.pids: set[int] = set()
        self._problem = ""
        self._selector = selector
        self._note = note
        self._control: Optional[socket.socket] = None
        self._buffer = b""
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
        self._control, theirs = socket.socketpair()
        self._control.settimeout(BEGIN_S)
        try:
            with theirs, open(os.devnull, "wb") as nowhere, outer.connect() as sockets:
                self.pids.add(
                    processes.spawn(
                        [sys.executable, PACKAGE, "tunnel"],
                        env=dict(os.environ),
                        cwd=os.sep,
                        output=nowhere.fileno(),
                        stdin=theirs.fileno(),
                    )
                )
                socket.send_fds(self._control, [b"\n"], [sockets.fileno()])
            self._control.sendall(json.dumps(config).encode() + b"\n")
        except OSError as error:
            self._fail(str(error.strerror))
            return
        self._control.setblocking(False)
        self._selector.register(self._control, selectors.EVENT_READ, self._read)

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
        self._buffer = b""
        self._fail("")

    def _read(self) -> None:
        assert self._control is not None
        data = b""
        with contextlib.suppress(OSError):
            data = self._control.recv(1 << 16)
        if not data:
            self._fail("its process has ended")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "note" in said:
                self._note(said["note"])
            elif said["problem"]:
                self._fail(said["problem"])
            else:
                self._deadline = 0.0

    def _fail(self, problem: str) -> None:
        self._problem, self._deadline = problem, 0.0
        if self._control is not None:
            with contextlib.suppress(KeyError):  # it was not registered yet
                self._selector.unregister(self._control)
            self._control.close()
            self._control = None
        processes.end_children(self.pids)
