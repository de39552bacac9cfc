"""The handshake by which nodes check that they reach each other's ports; the nonce itself is never sent.

The holder of the port sends a challenge. The caller answers with a challenge of its own, and a proof that it knows the
nonce; then the holder proves the same. Every proof is valid for one connection: an eavesdropper cannot replay it.
"""

from __future__ import annotations

import os
import socket
from typing import Optional

CALLER = "caller"
ECHO, SINK, SOURCE = MODES = "echo", "sink", "source"
"""Modes of a link measurement: the holder echoes the caller's bytes, discards them, or sends bytes without end."""
HOLDER = "holder"
LINE_LIMIT = 256
_GREETING = "distlaunch"


def make_challenge() -> str:
    return os.urandom(16).hex()


def make_greeting(challenge: str) -> bytes:
    """The first line that a held port sends while the nodes are checked."""
    return f"{_GREETING} {challenge}\n".encode()


def make_call(nonce: str, task: str, challenge: str, own: str, mode: str = CALLER) -> bytes:
    """The proof of a caller that knows the nonce; with one of MODES, the caller also asks for that mode.

    Args:
        nonce: the attempt's nonce.
        task: the task whose port is called.
        challenge: the challenge of the port's holder.
        own: the caller's challenge.
        mode: CALLER, or one of MODES.
    """
    return f"{own} {_prove(nonce, mode, task, challenge, own)}\n".encode()


def read_call(said: bytes, nonce: str, task: str, challenge: str) -> Optional[tuple[str, bytes]]:
    """The mode of a caller that knows the nonce, and the holder's answer; None for any other caller."""
    import hmac

    own, _, proof = said.decode("ascii", "replace").rstrip("\n").partition(" ")
    for mode in (CALLER, *MODES):
        if hmac.compare_digest(proof.encode(), _prove(nonce, mode, task, challenge, own).encode()):
            return mode, f"{_prove(nonce, HOLDER, task, challenge, own)}\n".encode()
    return None


def introduce(connection: socket.socket, nonce: str, task: str, mode: str = CALLER) -> bool:
    """Proves to the holder of a port that this process knows the nonce; returns whether the holder does.

    Raises:
        OSError: the connection broke, or the holder is late.
    """
    own = make_challenge()
    name, _, challenge = read_line(connection).decode("ascii", "replace").rstrip("\n").partition(" ")
    if name != _GREETING:
        return False
    connection.sendall(make_call(nonce, task, challenge, own, mode))
    return read_line(connection) == f"{_prove(nonce, HOLDER, task, challenge, own)}\n".encode()


def read_line(connection: socket.socket) -> bytes:
    """Reads a line byte by byte; it is incomplete if the other side closes the connection, or sends too much."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_LIMIT and (piece := connection.recv(1)):
        line += piece
    return line


def _prove(nonce: str, *words: str) -> str:
    import hashlib  # both are slow to import, and not every run checks its nodes
    import hmac

    return hmac.new(nonce.encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()
