"""An agent's part in the checks before a start: it answers who dials its ports, and looks and dials in children.

What it has to find out but must not wait for (a name server, a network file system) is done in a child, whose answer
is sent. Those children belong to the agent's tree: whatever ends that ends them.
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
    """The checks of one attempt; `close` ends what they have left open."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self._selector = selector
        self._send = send
        self._responders = PortResponders(selector)
        self._mark = ""
        self._readers: set[int] = set()

    def open_doors(self, ports: Mapping[str, int], nonce: str) -> list[Problem]:
        """Answers on the ports of the tasks, which are held; returns why not, or nothing."""
        try:
            self._responders.open(ports, nonce)
        except OSError as error:
            return [Problem("port-refused", f"a port cannot be listened on: {error.strerror}")]
        return []

    def inspect(self, order: Inspect, hello: Hello) -> None:
        if order.mark:
            self._mark = mark_path(order.shared, order.mark)
        self._begin(lambda: inspect(order, hello.cwd, hello.directory), "it could not be inspected")

    def dial(self, order: Dial) -> None:
        self._begin(lambda: dial(order), "it could not dial the others")

    def mute(self) -> None:
        """What is still under way is to be ended with all else: nobody wants to hear any more what comes of it."""
        for reader in self._readers:
            self._selector.unregister(reader)
            os.close(reader)
        self._readers.clear()

    def close(self) -> None:
        self.mute()
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
        heard = bytearray()

        def hear() -> None:
            data = os.read(reader, 1 << 16)
            heard.extend(data)
            if data:
                return
            self._readers.discard(reader)
            self._selector.unregister(reader)
            os.close(reader)
            message: Message = Refused([Problem("inspection-failed", failure)])
            with contextlib.suppress(ProtocolError, ValueError):
                [(message, _)] = Decoder().feed(bytes(heard))
            self._send(message)

        self._readers.add(reader)
        self._selector.register(reader, selectors.EVENT_READ, hear)


def _work(work: Callable[[], Message], writer: int) -> None:
    """The child's whole life."""
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
