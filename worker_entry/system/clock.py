"""Unix seconds that never jump: a machine's clock as it was when the run began there, carried on by one nobody can set.

All processes of a run on one machine have the same: the first one tells it to its children by an environment variable.
So the difference of two such times is how long it took, also where the machine's clock was set in between.
"""

from __future__ import annotations

import math
import os
import time

from worker_entry.protocol import environment

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps."""


def _find_zero() -> float:
    try:
        zero = float(os.environ[environment.CLOCK])
    except (KeyError, ValueError):
        zero = math.nan
    return zero if math.isfinite(zero) else time.time() - time.clock_gettime(_STEADY)


_zero = _find_zero()


def now() -> float:
    return time.clock_gettime(_STEADY) + _zero


def share() -> None:
    """Tells it to the processes that this one starts from now on."""
    os.environ[environment.CLOCK] = repr(_zero)
