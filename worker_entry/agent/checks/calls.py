"""What nodes say to each other when they check that they reach each other's ports; the nonce itself is never sent."""

from __future__ import annotations

import hashlib
import hmac


def make_greeting(nonce: str, task: str) -> bytes:
    """What a guarded port answers while the nodes are checked."""
    return f"distlaunch {_digest(nonce, 'greeting', task)}\n".encode()


def make_proof(nonce: str, task: str) -> bytes:
    """What a caller says who knows the nonce."""
    return f"distlaunch {_digest(nonce, 'caller', task)}\n".encode()


def _digest(nonce: str, *words: str) -> str:
    return hmac.new(nonce.encode(), " ".join(words).encode(), hashlib.sha256).hexdigest()
