"""Reads our control group's files, for cgroups version 1 and 2, on a machine or in a container."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Optional

from worker_entry.protocol.frozen import dataclass

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"


def find_file(controller: str, first: str, second: str, *, root: str = ROOT, own: str = OWN) -> Optional[str]:
    """Returns the path of a controller's file in our group, named `first` in version 1 and `second` in version 2."""
    with contextlib.suppress(OSError), open(own, encoding="utf-8") as stream:
        for line in stream:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                name, mounts = first, [f"{root}/{controller}"]
            elif not controllers:
                name, mounts = second, [root, f"{root}/unified"]
            else:
                continue
            for mount in mounts:
                # In a container, the path is often the machine's while the mount is the container's.
                for place in (f"{mount}{path.rstrip('/')}/{name}", f"{mount}/{name}"):
                    if os.path.exists(place):
                        return place
    return None


def cores_limit(*, root: str = ROOT, own: str = OWN) -> float:
    """The number of cores whose time our group may use, as a container's `cpus` sets it; infinite without a limit."""
    quota = find_file("cpu", "cpu.cfs_quota_us", "cpu.max", root=root, own=own)
    with contextlib.suppress(OSError, ValueError):
        if quota is not None and quota.endswith("cpu.max"):
            allowed, period = _read(quota).split()
            return int(allowed) / int(period)  # "max" raises ValueError
        if quota is not None and int(_read(quota)) > 0:
            return int(_read(quota)) / int(_read(f"{os.path.dirname(quota)}/cpu.cfs_period_us"))
    return math.inf


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a group: the group's folder, and the limit in bytes."""

    folder: str
    size: int

    def used(self) -> int:
        """The bytes that the group uses, without memory that the kernel frees at once: the cache of inactive files.

        Raises:
            OSError: the group's files cannot be read.
        """
        old = os.path.exists(f"{self.folder}/memory.usage_in_bytes")
        used = int(_read(f"{self.folder}/{'memory.usage_in_bytes' if old else 'memory.current'}"))
        for line in _read(f"{self.folder}/memory.stat").splitlines():
            name, _, size = line.partition(" ")
            if name == ("total_inactive_file" if old else "inactive_file"):
                used -= int(size)
        return max(used, 0)


def memory_limit(*, root: str = ROOT, own: str = OWN) -> Optional[MemoryLimit]:
    """The lowest limit of our group and its parents; None if there is none."""
    file = find_file("memory", "memory.limit_in_bytes", "memory.max", root=root, own=own)
    limits = []
    while file is not None and file.startswith(f"{root}/"):
        with contextlib.suppress(OSError, ValueError):  # "max" raises ValueError
            limits.append(MemoryLimit(os.path.dirname(file), int(_read(file))))
        folder, name = os.path.split(file)
        file = os.path.join(os.path.dirname(folder), name)
    return min(limits, key=lambda limit: limit.size, default=None)


def cpu_seconds(*, root: str = ROOT, own: str = OWN) -> Optional[float]:
    """The CPU seconds that our group has used; None if the kernel does not count them."""
    file = find_file("cpuacct", "cpuacct.usage", "cpu.stat", root=root, own=own)
    with contextlib.suppress(OSError, ValueError):
        if file is not None and file.endswith("cpu.stat"):
            return int(_read(file).partition("usage_usec ")[2].split("\n", 1)[0]) / 1e6
        if file is not None:
            return int(_read(file)) / 1e9
    return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read()
