"""A server with one thread per caller, which unverified callers cannot exhaust."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

from worker_entry.system.callers import Callers, Listener

TICK_S = 0.5
"""How often deadlines are checked."""
SHORTAGE_S = 0.1
"""The pause when no thread can be started."""

Serve = Callable[[socket.socket, Callable[[], None]], None]
"""Serves a caller, then returns; calls the function once the caller is verified. May raise OSError."""


class BoundedServer:
    """Serves the callers of a listener until `close`.

    Args:
        listener: listens already; the server owns it.
        serve: serves one caller and leaves the connection open; the server closes it afterwards.
        name: the name of the server's threads.
        limit: the maximum number of unverified callers.
        per_address: the maximum number of unverified callers from one address.
        within_s: how long a caller may stay unverified.
        tick: called twice a second; may return another listener, which replaces the first.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Serve,
        *,
        name: str,
        limit: int,
        per_address: int,
        within_s: float,
        tick: Callable[[], socket.socket | None] = lambda: None,
    ) -> None:
        self._listener = Listener(listener)
        self._serve = serve
        self._name = name
        self._tick = tick
        self._callers = Callers(limit, per_address, within_s)
        self._lock = threading.Lock()
        self._closed = False
        self._woken, self._wake = socket.socketpair()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Stops listening, and drops unverified callers; any thread may call it."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _run(self) -> None:
        listener = self._listener
        tick_due = time.monotonic() + TICK_S
        while not self._closed:
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            ready = dict(poll.poll(max(tick_due - time.monotonic(), 0.0) * 1000))
            if listener.fileno() in ready and not self._closed:
                self._accept(listener)
            if time.monotonic() >= tick_due:
                tick_due = time.monotonic() + TICK_S
                with self._lock:
                    overdue = self._callers.take_overdue(time.monotonic())
                _drop(overdue)
                if (other := self._tick()) is not None:
                    listener.close()
                    listener = Listener(other)
        listener.close()
        with self._lock:
            left = self._callers.take_all()
        _drop(left)
        self._woken.close()
        self._wake.close()

    def _accept(self, listener: Listener) -> None:
        try:
            accepted = listener.accept()
        except OSError:  # closed by its owner
            self._closed = True
            return
        if accepted is None:
            return
        caller, address = accepted
        caller.setblocking(True)
        with self._lock:
            replaced = self._callers.add(caller, str(address[0]) if address else "", time.monotonic())
        _drop(replaced)
        try:
            threading.Thread(target=self._meet, args=(caller,), name=f"{self._name}-call", daemon=True).start()
        except RuntimeError:  # no more threads are allowed
            self._note_proven(caller)
            caller.close()
            time.sleep(SHORTAGE_S)

    def _meet(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            self._serve(caller, lambda: self._note_proven(caller))
        self._note_proven(caller)

    def _note_proven(self, caller: socket.socket) -> None:
        with self._lock:
            self._callers.remove(caller)


def _drop(callers: list[socket.socket]) -> None:
    """Ends the connections; their threads notice."""
    for caller in callers:
        with contextlib.suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)
