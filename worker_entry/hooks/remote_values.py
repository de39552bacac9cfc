"""Inspects remote values: results that a worker of ParameterServerStrategy computes while the coordinator continues.

`ClusterCoordinator.schedule` returns a remote value at once. Reading it blocks until a worker has done the step, maybe
much later. So these functions first check its state in the private fields of TensorFlow's implementation.
"""

from __future__ import annotations

import sys
import time
from typing import Any

MODULE = "tensorflow.python.distribute.coordinator.remote_value"
COPY_S = 0.001
"""The approximate time that copying a result from a worker takes."""


def is_remote(value: Any) -> bool:
    """Whether the value is remote."""
    if type(value) is dict:  # by far the most frequent case
        return False
    kind = getattr(sys.modules.get(MODULE), "RemoteValue", None)
    return kind is not None and isinstance(value, kind)


def has_ended(value: Any) -> bool:
    """Whether the step is done, has failed, or was cancelled."""
    event = getattr(value, "_status_available_event", None)
    return event is not None and bool(event.is_set())


def is_done(value: Any) -> bool:
    """Whether a worker has done the step."""
    return has_ended(value) and getattr(value, "_error", None) is None


def is_here(value: Any) -> bool:
    """Whether the result is in this process, so that reading it needs no worker, which may be gone by now."""
    return is_done(value) and bool(getattr(value, "_has_fetched_to_local", True))


def wait_for(value: Any, timeout_s: float) -> None:
    """Waits at most `timeout_s` until the step has ended and its result is here."""
    if value._status_available_event.wait(timeout_s) and is_done(value) and not is_here(value):
        time.sleep(COPY_S)


class ScheduledLogs(dict):  # type: ignore[type-arg]  # Python 3.9 cannot subscript a base class
    """The logs of a scheduled step: the values known so far, and the remote value that shows when the step is done."""

    def __init__(self, known: dict[str, Any], result: Any) -> None:
        super().__init__(known)
        self.result = result


def result_of(logs: Any) -> Any:
    """The remote value that becomes available when the step of these logs is done; None if it is done already."""
    if isinstance(logs, ScheduledLogs):
        return logs.result
    return logs if is_remote(logs) and hasattr(logs, "_status_available_event") else None
