"""Measures the resource use of the whole machine, or of our container within its limits; Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Optional

from worker_entry.protocol.samples import GpuSample, NodeSample
from worker_entry.system import cgroups, hardware
from worker_entry.system.proc_files import read_small, read_whole
from worker_entry.system.process_use import TICK_S

INTERFACES = "/sys/class/net"


class NodeMeter:
    """Measures this node. Limits are looked up once: they do not change during a run."""

    def __init__(self, *, proc: str = "/proc", groups: str = cgroups.ROOT, interfaces: str = INTERFACES) -> None:
        self._proc, self._interfaces = proc, interfaces
        self._groups = {"root": groups, "own": f"{proc}/self/cgroup"}
        self._cores = hardware.cores()
        usable = os.sched_getaffinity(0)
        self._of_group = cgroups.cores_limit(**self._groups) < len(usable)
        self._usable = (
            {f"cpu{number}".encode() for number in usable} if len(usable) < (os.cpu_count() or 1) else {b"cpu"}
        )
        self._memory = cgroups.memory_limit(**self._groups)
        self._counted: dict[bytes, bool] = {}
        self.swaps = False
        """Whether swap was in use at the last `read`."""

    def read(self, gpus: list[GpuSample]) -> Optional[NodeSample]:
        """Returns the node's current use; None if /proc cannot be read."""
        try:
            busy_s = cgroups.cpu_seconds(**self._groups) if self._of_group else None
            used, total = self._read_memory()
            received, sent = self._read_network()
            return NodeSample(
                self._read_busy() if busy_s is None else busy_s, self._cores, used, total, received, sent, gpus
            )
        except (OSError, ValueError, IndexError, KeyError):
            return None

    def _read_busy(self) -> float:
        """Seconds in which the cores that we may use were busy, summed over the cores."""
        busy = 0
        for line in read_whole(f"{self._proc}/stat").splitlines():
            name, *fields = line.split()
            if not name.startswith(b"cpu"):
                break
            if name in self._usable:
                # user, nice, system, idle, iowait, irq, softirq; not steal, in which other virtual machines ran
                ticks = [int(field) for field in fields[:7]]
                busy += sum(ticks) - ticks[3] - ticks[4]
        return round(busy * TICK_S, 2)

    def _read_memory(self) -> tuple[int, int]:
        """The bytes in use, and the total bytes."""
        lines = (line.split() for line in read_small(f"{self._proc}/meminfo").splitlines())
        sizes = {fields[0]: int(fields[1]) << 10 for fields in lines if len(fields) > 1}
        total = sizes[b"MemTotal:"]
        self.swaps = sizes.get(b"SwapTotal:", 0) > sizes.get(b"SwapFree:", 0)
        if self._memory is not None and self._memory.size < total:
            return self._memory.used(), self._memory.size
        return max(total - sizes[b"MemAvailable:"], 0), total

    def _read_network(self) -> tuple[int, int]:
        """The bytes received and sent."""
        counts = dict(self._read_interfaces())
        if counts.keys() != self._counted.keys():
            self._counted = self._choose([*counts])
        chosen = [counts[name] for name, counted in self._counted.items() if counted]
        return sum(received for received, _ in chosen), sum(sent for _, sent in chosen)

    def _read_interfaces(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        for line in read_whole(f"{self._proc}/self/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(b":")
            fields = rest.split()
            yield name.strip(), (int(fields[0]), int(fields[8]))

    def _choose(self, names: list[bytes]) -> dict[bytes, bool]:
        """Decides which interfaces to count: only hardware, because bridges and bonds would count the same bytes again.

        If none is hardware, as in a container, all interfaces but the loopback count.
        """
        hardware = {name for name in names if self._is_hardware(os.fsdecode(name))}
        return {name: name in hardware if hardware else name != b"lo" for name in names}

    def _is_hardware(self, name: str) -> bool:
        folder = f"{self._interfaces}/{name}"
        # In a virtual machine, a network card may be a slave of another card, which counts the same bytes.
        return os.path.exists(f"{folder}/device") and not os.path.exists(f"{folder}/master/device")
