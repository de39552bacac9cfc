"""Measures what each task and its node use: CPU, memory, I/O, network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Optional

from worker_entry.agent.task_process import StartedTask
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.samples import NodeSample, TaskSample
from worker_entry.system import clock, hardware, kernel

SEARCH_S = 20.0
"""How often processes below the tasks are looked for: that reads the whole process table."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """Takes a sample of all running tasks from time to time."""

    def __init__(self) -> None:
        self._due = self._search_due = 0.0
        self._below: dict[int, list[int]] = {}
        """The processes below each task's own, as last found."""

    def poll(self, tasks: Mapping[str, StartedTask], now: float, sample_s: float) -> Optional[Sampled]:
        """The sample that is due; `now` is in monotonic seconds. Nothing is known on other systems than Linux."""
        if now < self._due or not sample_s or not kernel.LINUX:
            return None
        self._due = now + sample_s
        running = {name: task.pid for name, task in tasks.items() if task.running}
        if now >= self._search_due or not self._below.keys() >= set(running.values()):
            self._search_due = now + SEARCH_S
            self._below = kernel.below(running.values())
        samples = [_sample(name, [pid, *self._below[pid]]) for name, pid in running.items()]
        return Sampled(clock.now(), samples, _sample_node()) if samples else None


def _sample(name: str, pids: Iterable[int]) -> TaskSample:
    uses = [_read(pid) for pid in pids]
    return TaskSample(name, sum(seconds for seconds, _ in uses), sum(size for _, size in uses))


def _read(pid: int) -> tuple[float, int]:
    """CPU seconds, including children that have ended, and bytes of resident memory; 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) * _TICK_S, int(fields[21]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0.0, 0


def _sample_node() -> Optional[NodeSample]:
    """What the machine uses; None if that cannot be read."""
    try:
        with open("/proc/stat", "rb") as stream:
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = [int(field) for field in stream.readline().split()[1:9]]
        with open("/proc/meminfo", "rb") as stream:
            sizes = {line.split(b":")[0]: int(line.split()[1]) << 10 for line in stream}
        total, free = sizes[b"MemTotal"], sizes[b"MemAvailable"]
    except (OSError, ValueError, IndexError, KeyError):
        return None
    busy_s = (sum(ticks) - sum(ticks[3:5])) * _TICK_S
    return NodeSample(busy_s, hardware.cores(), max(total - free, 0), total)
