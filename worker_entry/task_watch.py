"""What is to be seen of running tasks from outside: ports that they open, signals that stop them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Union

from worker_entry.messages import Halted, Listening, Told
from worker_entry.ports import HeldPorts
from worker_entry.processes import Tree
from worker_entry.started_task import StartedTask


def watch_tasks(
    tasks: Mapping[str, StartedTask], ports: HeldPorts, tree: Tree, now: float
) -> Iterator[Union[Listening, Halted, Told]]:
    """What has changed since it was called last; `now`: monotonic seconds."""
    halts, tree.halts = tree.halts, []
    names = {task.pid: task.name for task in tasks.values()}
    for pid, signum in halts:
        if pid in names:
            yield Halted(names[pid], signum, time.time())
    for name in ports.newly_open(now):
        yield Listening(name, time.time())
    for task in tasks.values() if ports.forming else ():  # what matters while the cluster forms
        status = task.new_status()
        if status is not None:
            yield Told(task.name, status)
