"""Receives calls through the socket of an agent's reattach folder: a new connection, or the order to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Optional, Union

from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Broken, Message
from worker_entry.protocol.orders import VERSION, Attach, Goodbye
from worker_entry.protocol.values import Problem
from worker_entry.system.peer import find_peer, is_ours

HAND_OVER_S = 2.0
"""How long an agent waits for the message of an attach process that has connected."""
WORDS_LIMIT = 4 << 20
TAKEN = b"+"
"""The agent's answer to an attach process: from now on the agent uses its connection."""
NOT_NEEDED = b"."
"""The agent's answer to an attach process whose connection has broken or was replaced."""
KEPT = b"="
"""The agent's answer to the process whose run has ended, while the agent stays for the next run."""
REFUSED = b"-"


@dataclass(frozen=True)
class Reattachment:
    """A new connection: its descriptors, its Attach, and the socket to its attach process."""

    attach: Attach
    stdin: int
    stdout: int
    call: socket.socket

    def take(self) -> bool:
        """Accepts the connection; false if the attach process has ended, and the connection with it."""
        try:
            self.call.send(TAKEN)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Declines the connection without an answer; the attach process then ends on its own."""
        os.close(self.stdin)
        os.close(self.stdout)
        self.call.close()

    def refuse(self, problem: Problem) -> None:
        """Rejects a connection that was accepted before."""
        _reject(self.call, self.stdin, self.stdout, problem)


def receive_call(call: socket.socket) -> Union[Reattachment, Goodbye, None]:
    """The new connection, or Goodbye if the agent is asked to end; None if the caller is gone or was refused."""
    if not is_ours(call):
        call.close()
        return None
    call.settimeout(HAND_OVER_S)
    words, descriptors = b"", list[int]()
    try:
        words, descriptors, _, _ = socket.recv_fds(call, 1 << 16, 2)
        while not words.endswith(b"\n") and len(words) < WORDS_LIMIT:
            more = call.recv(1 << 16)
            words += more or b"\n"  # the caller has closed the socket: the frame is incomplete
    except OSError:  # the caller is gone or late, and may come again
        words = b""
    message = _parse(words)
    if isinstance(message, Goodbye):
        return message
    if len(descriptors) == 2 and words:
        stdin, stdout = descriptors
        if isinstance(message, Attach) and message.version == VERSION:
            return Reattachment(message, stdin, stdout, call)
        # A later version of distlaunch has to be able to say why it cannot take over the run.
        why = f"the agent was sent no Attach of its own version of distlaunch (protocol {VERSION})"
        problem = Problem("protocol-error", why)
        with contextlib.suppress(OSError):
            call.send(TAKEN)
        _reject(call, stdin, stdout, problem)
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        call.send(NOT_NEEDED)
    call.close()
    return None


def _parse(words: bytes) -> Optional[Message]:
    """The message in these bytes; None if they are not exactly one."""
    try:
        [(message, _)] = Decoder().feed(words)
    except (ValueError, ProtocolError):
        return None
    return message


def _reject(call: socket.socket, stdin: int, stdout: int, problem: Problem) -> None:
    with contextlib.suppress(OSError):
        os.write(stdout, MARKER + encode(Broken(problem)))
    release(call, REFUSED)
    os.close(stdin)
    os.close(stdout)


def release(call: socket.socket, word: bytes = b"") -> None:
    """Ends the wait of an attach process; continues it if a signal has stopped it, or it would stay forever."""
    with contextlib.suppress(OSError):
        if word:
            call.send(word)
    with contextlib.suppress(OSError):
        peer = find_peer(call)
        if peer is not None and peer.pid > 0:
            os.kill(peer.pid, signal.SIGCONT)
    call.close()
