"""Measures whether tasks are at work: by their CPU time, the bytes they read and write, and their logs.

A task that waits for others in a collective uses almost nothing, however long it waits. A task that exports a model or
evaluates takes no step for a while either, but it is at work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Activity
from worker_entry.system import kernel
from worker_entry.system.process_use import read_use

SAMPLE_S = 5.0
"""How often samples are taken."""
BUSY_SHARE = 0.1
"""Share of one core; a task that uses more is at work. A worker that waits in a collective uses a fiftieth."""
BUSY_BYTES_S = 16 << 10
"""Bytes per second read and written; a task that moves more is at work. Heartbeats take a few hundred."""
SHORTEST_S = 0.25
"""CPU time is counted in hundredths of a second: over a shorter interval it means nothing."""

_WAITS = (
    *(
        "futex",
        "pipe_",
        "anon_pipe",
        "unix_",
        "sk_",
        "tcp_",
        "inet_",
        "poll",
        "do_poll",
        "do_select",
        "ep_",
        "do_epoll",
    ),
    *("do_wait", "wait_"),
)
"""Prefixes of kernel functions in which a thread waits for a lock, for another process or for a child."""


@dataclass(frozen=True)
class _Sample:
    time: float
    cpu_s: float
    bytes: int
    log: int


class ActivityWatch:
    """Remembers when each task was last at work."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}
        """Of the tasks' own processes."""
        self._trees: dict[str, _Sample] = {}
        """Of all processes of the tasks, during a closer look; the two cannot be compared."""
        self._active: dict[str, float] = {}
        self._due = 0.0

    def poll(self, tasks: Mapping[str, StartedTask], now: float) -> None:
        """Samples the tasks' own processes if a sample is due; `now` is in monotonic seconds."""
        if now >= self._due:
            self._due = now + SAMPLE_S
            samples = {name: _sample(task, [task.pid], now) for name, task in tasks.items() if task.running}
            self._samples = self._compare(self._samples, samples)

    def begin(self, tasks: Mapping[str, StartedTask]) -> None:
        """Begins a closer look at all processes of the tasks; `report` ends it."""
        self._trees = _sample_trees(tasks)

    def report(self, tasks: Mapping[str, StartedTask]) -> dict[str, Activity]:
        """Each task's activity, from all samples so far."""
        if not kernel.LINUX:
            return {name: Activity() for name in tasks}
        self._compare(self._trees, _sample_trees(tasks))
        self._trees = {}
        now = time.monotonic()
        return {
            name: Activity(now - self._active[name] if name in self._active else None, _waits(task.pid))
            for name, task in tasks.items()
        }

    def _compare(self, earlier: Mapping[str, _Sample], samples: Mapping[str, _Sample]) -> dict[str, _Sample]:
        """Notes which tasks were at work between two samples; returns those to compare the next ones with."""
        kept = {}
        for name, sample in samples.items():
            kept[name] = sample
            before = earlier.get(name)
            if before is None:
                self._active.setdefault(name, sample.time)
                continue
            passed_s = sample.time - before.time
            if passed_s < SHORTEST_S:
                kept[name] = before
                continue
            used = sample.cpu_s - before.cpu_s > BUSY_SHARE * passed_s
            moved = sample.bytes - before.bytes > BUSY_BYTES_S * passed_s
            if used or moved or sample.log != before.log:
                self._active[name] = sample.time
        return kept


def _sample_trees(tasks: Mapping[str, StartedTask]) -> dict[str, _Sample]:
    now = time.monotonic()
    running = {name: task for name, task in tasks.items() if task.running}
    below = {name: [process.pid for process in kernel.descendants(task.pid)] for name, task in running.items()}
    return {name: _sample(task, [task.pid, *below[name]], now) for name, task in running.items()}


def _sample(task: StartedTask, pids: Iterable[int], now: float) -> _Sample:
    uses = [read_use(pid) for pid in pids]
    return _Sample(now, sum(use.cpu_s for use in uses), sum(use.read + use.written for use in uses), task.log.size())


def _waits(pid: int) -> bool:
    """Whether the process's main thread sleeps until a lock, another process or a child lets it go on."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii") as stream:
            return stream.read().startswith(_WAITS)
    except (OSError, ValueError):
        return False
