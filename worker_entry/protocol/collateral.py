"""How frameworks report that a peer is gone: the failures that only follow from another task's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from worker_entry.protocol.values import CrashRecord

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
)
"""How TensorFlow reports that a peer is gone; it has no exception of its own for that."""
_TORCH_EXCEPTIONS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_TORCH_SIGNATURES = (
    "Connection closed by peer",
    "gloo/transport/tcp",
    "a remote process exiting prematurely",
    "Did the remote server shutdown or crash",
)
"""The same for PyTorch."""
_COLLATERAL: tuple[tuple[Sequence[str], Sequence[str]], ...] = (
    (EXCEPTIONS, SIGNATURES),
    (_TORCH_EXCEPTIONS, _TORCH_SIGNATURES),
)
_NAMES = (*EXCEPTIONS, "UNAVAILABLE", "ABORTED", "INTERNAL")

OUT_OF_STEP = re.compile(
    r"Collective instance \d+ expected |Shape mismatch in the collective instance"
    r"|is joining a group (?:with size|with incompatible device type|that is already full)"
)
"""What TensorFlow reports when collectives that meet differ: the workers no longer do the same."""

_WRAPPER = re.compile(r"\{\{function_node [^}]*\}\} ?")


def without_wrappers(message: str) -> str:
    """The message without the names of the functions in which TensorFlow wraps single operations.

    Such a name contains the device, and so the name of the task itself.
    """
    return _WRAPPER.sub("", message)


def is_collateral_crash(crash: CrashRecord) -> bool:
    """Whether the exception only shows that a peer is gone."""
    if OUT_OF_STEP.search(crash.message) is not None:
        return False
    message = without_wrappers(crash.message)
    return any(
        crash.exception in exceptions and signature in message
        for exceptions, signatures in _COLLATERAL
        for signature in signatures
    )


def has_collateral_line(lines: Iterable[str]) -> bool:
    """Whether a log without an exception, of a process that TensorFlow has aborted, shows that a peer is gone."""
    return any(
        any(name in line for name in _NAMES) and any(signature in line for signature in SIGNATURES)
        for line in map(without_wrappers, lines)
    )
