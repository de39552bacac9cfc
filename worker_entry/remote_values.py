"""Results that a worker of ParameterServerStrategy computes while the coordinator's program goes on.

`ClusterCoordinator.schedule` returns them at once. To read one waits until the worker has done its step, which may be
long after; so it is asked first whether it is there, by what TensorFlow's own implementation keeps of it.
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "tensorflow.python.distribute.coordinator.remote_value"


def is_remote(value: Any) -> bool:
    """Whether it is one."""
    if type(value) is dict:  # what nearly every step has; asked for each of them
        return False
    kind = getattr(sys.modules.get(MODULE), "RemoteValue", None)
    return kind is not None and isinstance(value, kind)


def is_there(value: Any) -> bool:
    """Whether to read it does not wait for a worker; a TensorFlow that keeps this in another way is not waited for."""
    if not is_remote(value):
        return True
    event = getattr(value, "_status_available_event", None)
    return event is not None and bool(event.is_set())


def is_done(value: Any) -> bool:
    """Whether a worker has done the step; not if it has failed, or was cancelled."""
    return is_there(value) and getattr(value, "_error", None) is None


def can_be_asked(value: Any) -> bool:
    """Whether it is known of this remote value when it is there."""
    return is_remote(value) and getattr(value, "_status_available_event", None) is not None
