"""psutil's count of a run's leftover processes on this machine, independent of the agent's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.console.writer import Console
from launcher.spec.nodes import LOCAL
from launcher.wording import count_of
from worker_entry.protocol import environment


def find_left_processes(run_id: str) -> list[int]:
    """Returns the processes of this machine that have the run's id in a readable environment."""
    import psutil  # only at the end of a run

    found = []
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}  # None: another user's process, a zombie, or a process that has ended
        if variables.get(environment.RUN_ID) == run_id and process.pid != os.getpid():
            found.append(process.pid)
    return sorted(found)


def confirm_left(left: Mapping[str, int | None], run_id: str, console: Console) -> dict[str, int | None]:
    """Checks this machine's count against psutil's; if they differ, warns and returns the larger one."""
    counted = left.get(LOCAL)
    if counted is None:
        return dict(left)
    found = find_left_processes(run_id)
    if len(found) != counted:
        pids = f": {', '.join(map(str, found))}" if found else ""
        agents = count_of(counted, "process", "processes")
        console.warn(f"the agent on this machine counts {agents} left, but psutil counts {len(found)}{pids}")
    return {**left, LOCAL: max(counted, len(found))}
