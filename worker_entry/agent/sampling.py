"""Measures what each task uses: CPU and memory of all of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Optional

from worker_entry.agent.task_process import StartedTask
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.samples import TaskSample
from worker_entry.system import clock, kernel

SAMPLE_S = 2.0
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
        self._used: dict[str, tuple[float, float]] = {}
        """When each task was last sampled, and its CPU seconds by then."""

    def poll(self, tasks: Mapping[str, StartedTask], now: float) -> Optional[Sampled]:
        """The sample that is due; `now` is in monotonic seconds. Nothing is known on other systems than Linux."""
        if now < self._due or not kernel.LINUX:
            return None
        self._due = now + SAMPLE_S
        running = {name: task.pid for name, task in tasks.items() if task.running}
        if now >= self._search_due or not self._below.keys() >= set(running.values()):
            self._search_due = now + SEARCH_S
            self._below = kernel.below(running.values())
        samples = [self._sample(name, [pid, *self._below[pid]], now) for name, pid in running.items()]
        self._used = {name: used for name, used in self._used.items() if name in running}
        return Sampled(clock.now(), samples) if samples else None

    def _sample(self, name: str, pids: Iterable[int], now: float) -> TaskSample:
        uses = [_read(pid) for pid in pids]
        cpu_s = sum(seconds for seconds, _ in uses)
        before = self._used.get(name)
        self._used[name] = now, cpu_s
        cores = None
        if before is not None and now > before[0]:
            cores = max(cpu_s - before[1], 0.0) / (now - before[0])  # less if a process was lost from sight
        return TaskSample(name, cores, sum(size for _, size in uses))


def _read(pid: int) -> tuple[float, int]:
    """CPU seconds, including children that have ended, and bytes of resident memory; 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) * _TICK_S, int(fields[21]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0.0, 0
