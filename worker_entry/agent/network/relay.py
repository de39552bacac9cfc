"""Forwards a port of this machine's loopback address to the tasks' own network, for TensorBoard."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Optional

from worker_entry.protocol.messages import Noted
from worker_entry.system.network import Network
from worker_entry.system.ports import is_auxiliary

PIECE = 64 << 10
CONNECTIONS = 64


class Relay:
    """Passes connections on to one port."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._outside: Optional[socket.socket] = None
        self._port = 0
        self._open: set[_End] = set()

    def bring_out(self, ports: Mapping[str, int], outer: Network, send: Callable[[Noted], None]) -> None:
        """Opens the port of TensorBoard, if it is among the tasks."""
        for task, port in ports.items():
            if is_auxiliary(task):
                try:
                    self.open(port, outer)
                except OSError as error:
                    send(Noted(f"TensorBoard cannot be reached from outside: port {port}: {error.strerror}"))

    def open(self, port: int, outer: Network) -> None:
        """Listens outside on this port, unless it does already; passes connections on to the same port inside.

        Raises:
            OSError: the port is taken outside.
        """
        if self._outside is not None:
            return
        listener = outer.make_socket(socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(CONNECTIONS)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._outside, self._port = listener, port
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for end in list(self._open):
            end.close()
        if self._outside is not None:
            self._selector.unregister(self._outside)
            self._outside.close()
            self._outside = None

    def _accept(self) -> None:
        assert self._outside is not None
        with contextlib.suppress(OSError):
            caller, _ = self._outside.accept()
            inside = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            if len(self._open) >= 2 * CONNECTIONS or inside.connect_ex(("127.0.0.1", self._port)) != 0:
                caller.close()
                inside.close()
                return
            one, other = _End(self, caller), _End(self, inside)
            one.peer, other.peer = other, one
            self._open |= {one, other}
            one.watch()
            other.watch()


class _End:
    """One of a connection's two ends, and what is to be written to it."""

    def __init__(self, relay: Relay, stream: socket.socket) -> None:
        self._relay = relay
        self._stream = stream
        self._pending = b""
        self._ended = self._registered = False
        self.peer: _End
        stream.setblocking(False)

    def watch(self) -> None:
        """Registers this end for its next events: it is read only when the other end has nothing to write."""
        events = selectors.EVENT_WRITE if self._pending else 0
        events |= 0 if self.peer._pending or self._ended else selectors.EVENT_READ
        selector = self._relay._selector
        if self._registered:
            selector.unregister(self._stream)
        self._registered = bool(events)
        if events:
            selector.register(self._stream, events, self._go_on)

    def close(self) -> None:
        for end in (self, self.peer):
            if end in self._relay._open:
                self._relay._open.discard(end)
                if end._registered:
                    self._relay._selector.unregister(end._stream)
                end._stream.close()

    def _go_on(self) -> None:
        try:
            if self._pending:
                self._pending = self._pending[self._stream.send(self._pending) :]
            elif not self.peer._pending:
                self._read()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._ended and self.peer._ended and not self._pending and not self.peer._pending:
            self.close()
            return
        self.watch()
        self.peer.watch()

    def _read(self) -> None:
        self.peer._pending = self._stream.recv(PIECE)
        if not self.peer._pending:
            self._ended = True
            self.peer._stream.shutdown(socket.SHUT_WR)
