"""Detects an engine such as Slurm that has allocated this machine and itself stops the processes on it."""

from __future__ import annotations

import os


def is_managed() -> bool:
    """Whether Slurm's daemon has started this process, directly or indirectly.

    If so, SIGTERM goes to every process of the step at once, including the tasks, and SIGKILL follows later.
    """
    return "SLURM_JOB_ID" in os.environ and "SLURMD_NODENAME" in os.environ
