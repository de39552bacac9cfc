"""Whether an engine such as Slurm has given us this process's machine, and ends what runs there by itself."""

from __future__ import annotations

import os


def is_managed() -> bool:
    """Whether Slurm's daemon has started this process, directly or not.

    Then SIGTERM goes to every process of the step at once, ours and the tasks, and SIGKILL follows after a while.
    """
    return "SLURM_JOB_ID" in os.environ and "SLURMD_NODENAME" in os.environ
