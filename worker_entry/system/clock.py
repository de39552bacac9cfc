"""Unix seconds that never jump: the machine's time when the run began there, plus a monotonic clock.

All processes of a run on one machine share this clock: the first one passes it to its children in an environment
variable. So the difference of two times is a duration, even if the machine's clock was set in between.
"""

from __future__ import annotations

import math
import os
import time

from worker_entry.protocol import environment

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that goes on while the machine sleeps, if there is one."""


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
    """A time of this clock by the machine's own, which does not depend on when a run began."""
    return moment - _zero


def follow_environ() -> None:
    """From now on, shows the time of the run whose variables this process has."""
    global _zero
    _zero = _find_zero()


def share() -> None:
    """Passes the clock to all processes that this one starts from now on."""
    os.environ[environment.CLOCK] = repr(_zero)
