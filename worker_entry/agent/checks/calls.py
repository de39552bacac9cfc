"""What nodes say to each other when they check that they reach each other's ports; the nonce itself is never sent.

The holder of the port sends a challenge. The caller answers with a challenge of its own, and a proof that it knows the
nonce; then the holder proves the same. Every proof is for one connection: whoever has heard one cannot use it again.
"""

from __future__ import annotations

import os
import socket
from typing import Optional

CALLER = "caller"
ECHO, SINK, SOURCE = MODES = "echo", "sink", "source"
"""What a caller that measures the link may ask for: its bytes sent back, all bytes taken, bytes without end."""
HOLDER = "holder"
LINE_LIMIT = 256
_GREETING = "distlaunch"


def make_challenge() -> str:
    return os.urandom(16).hex()


def make_greeting(challenge: str) -> bytes:
    """What a held port says first while the nodes are checked."""
    return f"{_GREETING} {challenge}\n".encode()


def make_call(nonce: str, task: str, challenge: str, own: str, mode: str = CALLER) -> bytes:
    """The proof of a caller that knows the nonce; with one of MODES, the caller also asks for that mode.

    Args:
        nonce: of the attempt.
        task: whose port this is.
        challenge: that of the port's holder.
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
    """A line, byte by byte; shorter if the other side ends it, or says too much."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_LIMIT and (piece := connection.recv(1)):
        line += piece
    return line


def _prove(nonce: str, *words: str) -> str:
    import hashlib  # both are slow to import, and not every run checks its nodes
    import hmac

    return hmac.new(nonce.encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()
