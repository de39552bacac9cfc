"""Answers connections to the ports that an agent holds for its tasks, while the nodes are checked."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Optional

from worker_entry.agent.checks.calls import CALLER, LINE_LIMIT, make_challenge, make_greeting, read_call
from worker_entry.system.callers import Callers

CALLERS = 256
"""Maximum number of unverified callers, over all ports of the node."""
CALLERS_OF_ADDRESS = 128
"""Maximum number of unverified callers from one address, which all nodes of a cluster may share."""
_RESET = struct.pack("ii", 1, 0)
PROOF_S = 10.0
"""How long a caller may take to prove that it belongs to the cluster."""


class Answering:
    """The callers of an agent's ports. Its sockets are all non-blocking.

    Args:
        selector: has the callers' sockets.
        serve: takes over the connection of a caller that measures the link, in the mode that the caller asks for.
    """

    def __init__(self, selector: selectors.BaseSelector, serve: Callable[[socket.socket, str], None]) -> None:
        self._selector = selector
        self._serve = serve
        self._unproven = Callers(CALLERS, CALLERS_OF_ADDRESS, PROOF_S)
        self._open: set[socket.socket] = set()

    def take(
        self, caller: socket.socket, address: str, nonce: str, task: str, meet: Optional[Callable[[], None]] = None
    ) -> None:
        """Greets a caller; calls `meet` once the caller has proven that it knows the nonce."""
        caller.setblocking(False)
        for other in self._unproven.add(caller, address, time.monotonic()):
            self._end(other)
        challenge, said = make_challenge(), bytearray()

        def hear() -> None:
            piece = b""
            with contextlib.suppress(OSError):
                piece = caller.recv(LINE_LIMIT)
            said.extend(piece)
            if piece and not said.endswith(b"\n") and len(said) < LINE_LIMIT:
                return
            found = read_call(bytes(said), nonce, task, challenge) if piece and caller in self._unproven else None
            if found is None:
                self._end(caller, is_over=not piece)
                return
            self._unproven.remove(caller)
            mode, answer = found
            with contextlib.suppress(OSError):  # the caller is gone
                caller.send(answer)
            if mode != CALLER:
                self._serve(caller, mode)
                self._end(caller, is_over=True)  # a child serves it
            elif meet is not None:
                meet()

        self._open.add(caller)
        self._selector.register(caller, selectors.EVENT_READ, hear)
        with contextlib.suppress(OSError):
            caller.send(make_greeting(challenge))

    def poll(self, now: float) -> None:
        """Drops the callers that are late; `now`: monotonic seconds."""
        for caller in self._unproven.take_overdue(now):
            self._end(caller)

    def end(self) -> None:
        """Drops all callers."""
        for caller in list(self._open):
            self._end(caller)

    def _end(self, caller: socket.socket, *, is_over: bool = False) -> None:
        """Closes a connection; unless the caller has closed it, resets it: the kernel would keep our port busy."""
        if not is_over:
            with contextlib.suppress(OSError):
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._unproven.remove(caller)
        self._open.discard(caller)
        self._selector.unregister(caller)
        caller.close()
