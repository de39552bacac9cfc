"""An agent's part of the checks before a start: it answers on its tasks' ports; child processes inspect and dial."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Optional, Union

from worker_entry.agent.checks.inspection import mark_path
from worker_entry.agent.checks.port_responder import PortResponders
from worker_entry.agent.checks.speed_child import SpeedChild
from worker_entry.agent.helpers import works
from worker_entry.agent.helpers.child_work import ChildWork
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Message, Refused
from worker_entry.protocol.orders import Dial, Hello, Inspect
from worker_entry.protocol.speed import LinkMeasured, MeasureLink, MeasureNode
from worker_entry.protocol.values import Problem
from worker_entry.system import processes
from worker_entry.system.network import HERE

AT_ONCE = 4
"""Only one node measures this one at a time, but earlier processes may still be ending."""


class NodeChecks:
    """The checks of one attempt; `close` releases their resources."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self.outer: Optional[OuterNetwork] = None
        """The network in which the ports are held; None for this process's network."""
        self._send = send
        self._work = ChildWork(selector)
        self.links = LinkServers()
        self.speed = SpeedChild(selector, send)
        self._responders = PortResponders(selector, self.links.begin)
        self._mark = ""

    def open_responders(self, ports: Mapping[str, int], nonce: str) -> list[Problem]:
        """Starts to answer on the tasks' held ports; returns the problem if a port cannot listen."""
        try:
            self._responders.open(ports, nonce, self.outer or HERE)
        except OSError as error:
            return [Problem("port-refused", f"cannot listen on a port: {error.strerror}")]
        return []

    def take(self, order: Union[Inspect, Dial, MeasureNode, MeasureLink], hello: Hello) -> None:
        """Carries out the order and sends its answer."""
        if isinstance(order, Inspect):
            self._inspect(order, hello)
        elif isinstance(order, Dial):
            refused = Refused([Problem("inspection-failed", "the node could not dial the other nodes")])
            self._begin(works.DIAL, encode(order), refused)
        elif isinstance(order, MeasureNode):
            self.speed.measure(order)
        else:
            self._begin(works.MEASURE_LINK, encode(order), LinkMeasured(problem="no answer"))

    def _inspect(self, order: Inspect, hello: Hello) -> None:
        if order.mark:
            self._mark = mark_path(order.shared, order.mark)
        refused = Refused([Problem("inspection-failed", "the node could not be inspected")])
        self._begin(works.INSPECT, encode(hello) + encode(order), refused)

    def poll(self, now: float) -> None:
        """Drops callers that are late; `now`: monotonic seconds."""
        self._responders.poll(now)

    def cancel(self) -> None:
        """Drops the answers of running checks; the caller stops their processes with the rest of the tree."""
        self._work.cancel()
        self.speed.end()
        self.links.end()

    def end_marks(self) -> None:
        """Removes the marks of all nodes, so that no task finds one: another node may be slower to remove its own."""
        if self._mark:
            folder, _, name = self._mark.rpartition(os.sep)
            group = f"{name.rpartition('-')[0]}-"
            with contextlib.suppress(OSError):
                for entry in [*os.scandir(folder or os.sep)]:
                    if entry.name.startswith(group):
                        with contextlib.suppress(OSError):
                            os.unlink(entry.path)

    def close(self) -> None:
        self.cancel()
        self._responders.close()
        if self._mark:
            with contextlib.suppress(OSError):
                os.unlink(self._mark)
            self._mark = ""

    def _begin(self, work: str, data: bytes, failure: Message) -> None:
        self._work.begin_answer(work, data, self._send, failure, self.outer)


class LinkServers:
    """Child processes that serve link measurements; `pids` contains them."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def begin(self, connection: socket.socket, mode: str) -> None:
        """Serves the connection in a child; the caller closes its own end of it."""
        if len(self.pids) >= AT_ONCE:
            return
        try:
            pid = os.fork()
        except OSError:  # no more processes: the peer then reports that this side does not measure
            return
        if pid:
            self.pids.add(pid)
            return
        try:
            os.dup2(connection.detach(), 0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            processes.become_independent()
            from worker_entry.agent.checks.link_speed import serve_link

            serve_link(socket.socket(fileno=0), mode)
        finally:
            os._exit(0)

    def end(self) -> None:
        """Kills the children and waits until they are gone."""
        processes.end_children(self.pids)
