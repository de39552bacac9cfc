"""An agent's part of the checks before a start: it answers on its tasks' ports, and inspects and dials in children.

A check may block (on a name server, on a network file system), and the agent must not. So each check runs in a child
process whose answer the agent forwards. The children belong to the agent's process tree and are stopped with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Mapping

from worker_entry.agent.checks.inspection import inspect, mark_path
from worker_entry.agent.checks.port_responder import PortResponders, dial
from worker_entry.protocol.framing import Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Message, Refused
from worker_entry.protocol.orders import Dial, Hello, Inspect
from worker_entry.protocol.values import Problem


class NodeChecks:
    """The checks of one attempt; `close` releases what they hold."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self._selector = selector
        self._send = send
        self._responders = PortResponders(selector)
        self._mark = ""
        self._readers: set[int] = set()

    def open_responders(self, ports: Mapping[str, int], nonce: str) -> list[Problem]:
        """Answers on the tasks' held ports; returns the problem if that is not possible."""
        try:
            self._responders.open(ports, nonce)
        except OSError as error:
            return [Problem("port-refused", f"cannot listen on a port: {error.strerror}")]
        return []

    def inspect(self, order: Inspect, hello: Hello) -> None:
        if order.mark:
            self._mark = mark_path(order.shared, order.mark)
        self._begin(lambda: inspect(order, hello.cwd, hello.directory), "the node could not be inspected")

    def dial(self, order: Dial) -> None:
        self._begin(lambda: dial(order), "the node could not dial the others")

    def cancel(self) -> None:
        """Drops the answers of running checks; the caller stops their processes with the rest of the tree."""
        for reader in self._readers:
            self._selector.unregister(reader)
            os.close(reader)
        self._readers.clear()

    def close(self) -> None:
        self.cancel()
        self._responders.close()
        if self._mark:
            with contextlib.suppress(OSError):
                os.unlink(self._mark)
            self._mark = ""

    def _begin(self, work: Callable[[], Message], failure: str) -> None:
        reader, writer = os.pipe()
        if os.fork() == 0:
            _work(work, writer)
        os.close(writer)
        answer = bytearray()

        def read_answer() -> None:
            data = os.read(reader, 1 << 16)
            answer.extend(data)
            if data:
                return
            self._readers.discard(reader)
            self._selector.unregister(reader)
            os.close(reader)
            message: Message = Refused([Problem("inspection-failed", failure)])
            with contextlib.suppress(ProtocolError, ValueError):
                [(message, _)] = Decoder().feed(bytes(answer))
            self._send(message)

        self._readers.add(reader)
        self._selector.register(reader, selectors.EVENT_READ, read_answer)


def _work(work: Callable[[], Message], writer: int) -> None:
    """Runs in the child: does the work, writes its answer and exits."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        with os.fdopen(writer, "wb") as stream:
            stream.write(encode(work()))
        status = 0
    finally:
        os._exit(status)
