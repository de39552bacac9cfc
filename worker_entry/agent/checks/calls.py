"""What nodes say to each other when they check that they reach each other's ports; the nonce itself is never sent."""

from __future__ import annotations

from typing import Optional

ECHO, SINK, SOURCE = MODES = "echo", "sink", "source"
"""What a caller that measures the link may ask for: its bytes sent back, all bytes taken, bytes without end."""


def make_greeting(nonce: str, task: str) -> bytes:
    """What a guarded port answers while the nodes are checked."""
    return f"distlaunch {_digest(nonce, 'greeting', task)}\n".encode()


def make_proof(nonce: str, task: str, mode: str = "caller") -> bytes:
    """The proof of a caller that knows the nonce; with one of MODES, the caller also asks for that mode."""
    return f"distlaunch {_digest(nonce, mode, task)}\n".encode()


def find_mode(nonce: str, task: str, proof: bytes) -> Optional[str]:
    """The mode that this proof asks for; None if it asks for none of MODES."""
    return next((mode for mode in MODES if is_proof(proof, nonce, task, mode)), None)


def is_proof(said: bytes, nonce: str, task: str, mode: str = "caller") -> bool:
    """Whether these bytes are the proof of a caller that knows the nonce, for this mode."""
    import hmac

    return hmac.compare_digest(said, make_proof(nonce, task, mode))


def _digest(nonce: str, *words: str) -> str:
    import hashlib  # both are slow to import, and not every run checks its nodes
    import hmac

    return hmac.new(nonce.encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()
