"""Measures what each task and its node use: CPU, memory, threads, I/O, network, GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Optional

from worker_entry.agent.gpus.watch import GpuWatch
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.samples import TaskSample
from worker_entry.system import clock, kernel
from worker_entry.system.process_use import NodeMeter, StarvedTime, read_swapped, read_use

SEARCH_S = 20.0
"""How often to look for processes below the tasks: a search reads the whole process table."""
SHARE = 0.002
"""Share of a core that samples may cost; if they cost more, they are taken less often."""
LONGEST_S = 10.0
"""The longest interval that the cost of samples can cause."""


class Sampler:
    """Takes a sample of all running tasks from time to time."""

    def __init__(self, gpus: GpuWatch) -> None:
        self._gpus = gpus
        self._due = self._search_due = 0.0
        self._below: dict[int, list[int]] = {}
        """The processes below each task's own, as last found."""
        self._starved: dict[int, StarvedTime] = {}
        self._node: Optional[NodeMeter] = None

    def poll(self, tasks: Mapping[str, StartedTask], now: float, sample_s: float) -> Optional[Sampled]:
        """The sample that is due; `now` is in monotonic seconds. There are samples on Linux only."""
        if now < self._due or not sample_s or not kernel.LINUX:
            return None
        self._due = now + sample_s
        running = {name: task.pid for name, task in tasks.items() if task.running}
        if not running:
            return None
        began = time.thread_time()
        sampled = self._sample(running, now, sample_s)
        cost_s = time.thread_time() - began
        self._due = now + max(sample_s, min(cost_s / SHARE, LONGEST_S))
        return sampled

    def _sample(self, running: Mapping[str, int], now: float, sample_s: float) -> Sampled:
        if now >= self._search_due or not self._below.keys() >= set(running.values()):
            self._search_due = now + SEARCH_S
            self._below = kernel.below(running.values())
        self._starved = {pid: self._starved.get(pid) or StarvedTime() for pid in running.values()}
        self._node = self._node or NodeMeter()
        node = self._node.read(self._gpus.poll(now, sample_s))
        swaps = self._node.swaps
        return Sampled(clock.now(), [self._sample_task(name, pid, swaps=swaps) for name, pid in running.items()], node)

    def _sample_task(self, name: str, pid: int, *, swaps: bool) -> TaskSample:
        pids = [pid, *self._below[pid]]
        uses = [read_use(each) for each in pids]
        return TaskSample(
            name,
            cpu_s=round(sum(use.cpu_s for use in uses), 2),
            memory=sum(use.memory for use in uses),
            starved_s=self._starved[pid].update(pids),
            swapped=sum(map(read_swapped, pids)) if swaps else 0,
            threads=sum(use.threads for use in uses),
            read=sum(use.read for use in uses),
            written=sum(use.written for use in uses),
        )
