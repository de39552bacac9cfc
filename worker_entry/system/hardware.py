"""This machine's cores, GPUs and name."""

from __future__ import annotations

import math
import os
import socket
from typing import Optional

from worker_entry.system.cgroups import cores_limit
from worker_entry.system.engine import is_managed


def cores() -> int:
    """Cores that this process may use; a container may have fewer than the machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Slurm may leave it to us to keep to the cores that it has given to the job here.
    given = os.environ.get("SLURM_CPUS_ON_NODE", "") if is_managed() else ""
    count = min(count, int(given)) if given.isdigit() and int(given) else count
    return math.ceil(min(count, max(cores_limit(), 1.0)))


def gpus() -> list[str]:
    """Identifiers for CUDA_VISIBLE_DEVICES of the NVIDIA GPUs that this process may use."""
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
    """What CUDA_VISIBLE_DEVICES names; None if it is not set, so that all GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    chosen = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything after the first invalid entry; people write "-1" for none.
    return chosen[: next((i for i, name in enumerate(chosen) if name in ("", "-1")), len(chosen))]


def has_nvidia_smi() -> bool:
    """Whether the program is installed."""
    return any(os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in os.get_exec_path())


def machine() -> str:
    """Names the running kernel: the containers of a machine share it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return hostname()


def hostname() -> str:
    return socket.gethostname()
