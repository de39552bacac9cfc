"""Watches running tasks from outside: the ports that they open, signals that suspend them, and their status files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Union

from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.messages import Halted, InterruptTaken, Listening, Returned, Status
from worker_entry.system import clock
from worker_entry.system.ports import HeldPorts
from worker_entry.system.processes import Tree

STATUS_S = 0.5
"""How often status files are read once the cluster is up."""


class TaskWatch:
    """Polls the tasks of an agent."""

    def __init__(self) -> None:
        self._due = 0.0

    def poll(
        self, tasks: Mapping[str, StartedTask], ports: HeldPorts, tree: Tree, now: float
    ) -> Iterator[Union[Listening, Halted, Status, Returned, InterruptTaken]]:
        """Yields the changes since the last call; `now` is in monotonic seconds."""
        halts, tree.halts = tree.halts, []
        by_pid = {task.pid: task for task in tasks.values() if task.running}
        for pid, signum in halts:
            if pid in by_pid:
                by_pid[pid].halted = halted = Halted(by_pid[pid].name, signum, clock.now())
                yield halted
        for name in ports.newly_open(now):
            yield Listening(name, clock.now())
        if ports.forming or now >= self._due:
            self._due = now + STATUS_S
            for task in tasks.values():
                yield from task.new_status()
                if task.running:
                    if tree.interrupts:
                        yield from task.new_interrupt()
                    yield from task.new_return()
