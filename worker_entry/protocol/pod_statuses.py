"""The exit statuses of a task's pod, which decide what Kubernetes does next."""

from __future__ import annotations

import signal
from collections.abc import Mapping

OK = 0
FAILED = 1
"""The program failed: a restart counts."""
USAGE = 2
"""The program cannot be started, or refuses its arguments: a restart would not help."""
INFRASTRUCTURE = 3
"""The cluster did not form in time: a restart counts."""
SAVED = 42
"""PreemptionCheckpointHandler has saved a checkpoint: a restart is free."""
COLLATERAL = 76
"""The task failed only because a peer was gone: the peer's status decides."""
NO_PROGRESS = 93
"""The next attempt would get no further."""
KILLED = 128 + signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM
"""The task was asked to stop: a restart is free."""

PREEMPTED = (SAVED, TERMINATED)
HOPELESS = (USAGE, NO_PROGRESS)

_RETRIED = 138
"""The status that TFJob reserves for a retryable error of the user's."""
FOR_TFJOB: Mapping[int, int] = {SAVED: TERMINATED, COLLATERAL: _RETRIED}
"""TFJob restarts a pod after any status of at least 128, and after no other status; this rule cannot be configured."""


def for_tfjob(status: int) -> int:
    """Returns the status that makes TFJob do what `status` means."""
    if status in FOR_TFJOB:
        return FOR_TFJOB[status]
    # TFJob cannot limit restarts, so a failure whose restart would count must not be repeated.
    return FAILED if status >= 128 and status != TERMINATED else status
