"""This machine's cores, GPUs and name."""

from __future__ import annotations

import math
import os
import socket
from typing import Optional

from worker_entry.system.cgroups import cores_limit
from worker_entry.system.engine import is_managed
from worker_entry.system.machine import boot_id


def cores() -> int:
    """The number of cores that this process may use; in a container, possibly fewer than the machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Slurm may not enforce the number of cores that it has allocated to the job here.
    given = os.environ.get("SLURM_CPUS_ON_NODE", "") if is_managed() else ""
    count = min(count, int(given)) if given.isdigit() and int(given) else count
    return math.ceil(min(count, max(cores_limit(), 1.0)))


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as identifiers for CUDA_VISIBLE_DEVICES."""
    visible = visible_gpus()
    if visible is not None:
        return visible
    if not has_nvidia_smi():
        return []
    import subprocess

    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607 - found as the driver installed it
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listing.stdout.split()


def visible_gpus() -> Optional[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES names; None if the variable is not set, so that all GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    chosen = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything from the first invalid entry on; "-1" is the usual entry for no GPU.
    return chosen[: next((i for i, name in enumerate(chosen) if name in ("", "-1")), len(chosen))]


def has_nvidia_smi() -> bool:
    """Whether the program nvidia-smi is installed."""
    return any(os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in os.get_exec_path())


def machine() -> str:
    """The id of the running kernel, which the containers of a machine share."""
    return boot_id() or hostname()


def hostname() -> str:
    return socket.gethostname()
