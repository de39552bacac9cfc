"""Reads our control group's files, for cgroups version 1 and 2, on a machine or in a container."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Optional

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"


def find_file(controller: str, first: str, second: str, *, root: str = ROOT, own: str = OWN) -> Optional[str]:
    """The path of a controller's file in our group; version 1 names the file `first`, version 2 `second`."""
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
    """How many cores' time our group may use, as set by a container's `cpus`; infinite without a limit."""
    quota = find_file("cpu", "cpu.cfs_quota_us", "cpu.max", root=root, own=own)
    with contextlib.suppress(OSError, ValueError):
        if quota is not None and quota.endswith("cpu.max"):
            allowed, period = _read(quota).split()
            return int(allowed) / int(period)  # "max" raises ValueError
        if quota is not None and int(_read(quota)) > 0:
            return int(_read(quota)) / int(_read(quota.replace("quota", "period")))
    return math.inf


def _read(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read()
