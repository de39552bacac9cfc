"""An independent count of what a run has left on this machine: psutil's, beside the agent's own."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from launcher.console.writer import Console
from launcher.spec.models import LOCAL
from launcher.wording import count_of
from worker_entry.protocol import environment


def find_left_processes(run_id: str) -> list[int]:
    """The processes of this machine that run with the run's id in their environment, as far as they may be read."""
    found = []
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}  # None: of another user, a zombie, or gone
        if variables.get(environment.RUN_ID) == run_id and process.pid != os.getpid():
            found.append(process.pid)
    return sorted(found)


def confirm_left(left: Mapping[str, int | None], run_id: str, console: Console) -> dict[str, int | None]:
    """Checks this machine's count; if psutil's differs, warns the user and takes the larger one."""
    counted = left.get(LOCAL)
    if counted is None:
        return dict(left)
    found = find_left_processes(run_id)
    if len(found) != counted:
        pids = f": {', '.join(map(str, found))}" if found else ""
        agents = count_of(counted, "process", "processes")
        console.warn(f"the agent of this machine counts {agents} left, psutil {len(found)}{pids}")
    return {**left, LOCAL: max(counted, len(found))}
