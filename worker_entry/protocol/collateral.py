"""Recognises failures that only follow from another task's failure, by how frameworks report that a peer is gone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Union

from worker_entry.protocol.values import CrashRecord, FirstError

EXCEPTIONS = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "InternalError",
    "DeadlineExceededError",
)
SIGNATURES = (
    "Socket closed",
    "Connection reset by peer",
    "failed to connect to all addresses",
    "stopped sending heartbeats",
    "different incarnation",
    "cluster check alive failed",
    "The tasks have crashed",
    "/replica:0/task:",
    "RPC: /tensorflow.CoordinationService/Heartbeat",  # not answered in time
)
"""TensorFlow's messages that a peer is gone; TensorFlow has no exception for this case alone."""
_TORCH_EXCEPTIONS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_TORCH_SIGNATURES = (
    "Connection closed by peer",
    "gloo/transport/tcp",
    "a remote process exiting prematurely",
    "Did the remote server shutdown or crash",
)
"""PyTorch's messages that a peer is gone."""
_JAX_EXCEPTIONS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError")
_JAX_SIGNATURES = ("gloo/transport/tcp", "stopped sending heartbeats", "coordination service", "Socket closed")
"""JAX's messages that a peer is gone; a copy of a value to all processes raises a ValueError."""
_FATAL = "the JAX distributed service detected fatal errors"
"""What JAX's client logs when it aborts its process because a peer is gone."""
_COLLATERAL: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (EXCEPTIONS, SIGNATURES),
    (_TORCH_EXCEPTIONS, _TORCH_SIGNATURES),
    (_JAX_EXCEPTIONS, _JAX_SIGNATURES),
)
_NAMES = (*EXCEPTIONS, "UNAVAILABLE", "ABORTED", "INTERNAL")

OUT_OF_STEP = re.compile(
    r"Collective instance \d+ expected |Shape mismatch in the collective instance"
    r"|is joining a group (?:with size|with incompatible device type|that is already full)"
)
"""TensorFlow's messages that the workers' collectives do not match: the workers are out of step."""

_WRAPPER = re.compile(r"\{\{function_node [^}]*\}\} ?")


def without_wrappers(message: str) -> str:
    """Removes the names of the functions in which TensorFlow wraps single operations.

    Such a name contains the device, and so the task's own name, which would match a signature.
    """
    return _WRAPPER.sub("", message)


def is_collateral_crash(crash: CrashRecord) -> bool:
    """Whether the exception, or the one from which it follows, only shows that a peer is gone."""
    errors: list[Union[CrashRecord, FirstError]] = [crash] if crash.first is None else [crash, crash.first]
    if any(OUT_OF_STEP.search(error.message) is not None for error in errors):
        return False
    return any(map(_shows_lost_peer, errors))


def _shows_lost_peer(error: Union[CrashRecord, FirstError]) -> bool:
    message = without_wrappers(error.message)
    return any(
        error.exception in exceptions and signature in message
        for exceptions, signatures in _COLLATERAL
        for signature in signatures
    )


def has_collateral_line(lines: Iterable[str]) -> bool:
    """Whether the log of a process that its framework aborted without an exception shows that a peer is gone."""
    return any(
        _FATAL in line or (any(name in line for name in _NAMES) and any(signature in line for signature in SIGNATURES))
        for line in map(without_wrappers, lines)
    )
