"""Unix seconds that never jump: the machine's time when the run began there, plus a monotonic clock.

All processes of a run on one machine share this clock: the first process passes it to its children in an environment
variable. So the difference between two times is a duration, even if the machine's clock was set in between.
"""

from __future__ import annotations

import math
import os
import time

from worker_entry.protocol import environment

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that keeps counting while the machine sleeps, if the system has one."""


def _find_zero() -> float:
    try:
        zero = float(os.environ[environment.CLOCK])
    except (KeyError, ValueError):
        zero = math.nan
    return zero if math.isfinite(zero) else time.time() - time.clock_gettime(_STEADY)


_zero = _find_zero()


def now() -> float:
    return time.clock_gettime(_STEADY) + _zero


def steady(moment: float) -> float:
    """Converts a time of this clock to the machine's monotonic clock, which does not depend on the run."""
    return moment - _zero


def follow_environ() -> None:
    """Switches to the clock of the run whose variables this process has now."""
    global _zero
    _zero = _find_zero()


def share() -> None:
    """Passes the clock to all processes that this process starts later."""
    os.environ[environment.CLOCK] = repr(_zero)
