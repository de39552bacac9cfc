"""Decides whether an agent has ended. Two tasks must never use one address at once, so only a proof counts.

If the lock of the agent's folder is free, that is a proof. A missing folder is not: cleaners remove the folders of
running processes (logind's RemoveIPC, a Slurm epilog), and another container has other folders. In this case, the end
is proven by a search of all processes, if this process can see what the agent saw, or by a restart of the machine.
"""

from __future__ import annotations

import enum
import fcntl
import os
from collections.abc import Collection

from worker_entry.agent.connection.reattach_folder import LOCK, PREFIX, lock_file
from worker_entry.protocol import environment
from worker_entry.system import kernel
from worker_entry.system.lock_holders import find_holders
from worker_entry.system.machine import has_restarted, is_same_view


class Fate(enum.Enum):
    """What is known of an agent and all processes below it."""

    ALIVE = enum.auto()
    ENDED = enum.auto()
    UNKNOWN = enum.auto()
    """Nothing is proven before the agent's lease has expired."""


def find_fate(reattach_folder: str, process_view: str = "", run_ids: Collection[str] = ()) -> Fate:
    """Whether the agent of a folder has ended.

    Args:
        reattach_folder: from the agent's Ready; empty if there was none.
        process_view: from there as well; empty if it is not known.
        run_ids: the agent's run.
    """
    if not reattach_folder:
        return Fate.UNKNOWN
    try:
        lock = os.open(lock_file(reattach_folder), os.O_RDWR)
    except FileNotFoundError:
        return _search(reattach_folder, process_view, run_ids)
    except OSError:
        return Fate.UNKNOWN
    try:
        # Shared, so that two processes that check at the same time do not take each other for the agent.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return Fate.ALIVE
    finally:
        os.close(lock)
    return Fate.ENDED


def _search(reattach_folder: str, process_view: str, run_ids: Collection[str]) -> Fate:
    if find_agent(reattach_folder) or find_processes(reattach_folder, run_ids):
        return Fate.ALIVE
    proven = is_same_view(process_view) if kernel.LINUX else False
    return Fate.ENDED if proven or has_restarted(process_view) else Fate.UNKNOWN


def find_agent(reattach_folder: str) -> list[kernel.Process]:
    """The agent of a folder and its guardian, found by the lock that they hold, even if the folder is gone."""
    pids = {pid for pid, folder in find_holders(PREFIX, LOCK) if folder == reattach_folder}
    return [process for process in map(kernel.look_up, pids) if process is not None]


def find_processes(reattach_folder: str, run_ids: Collection[str]) -> list[kernel.Process]:
    """The processes of these runs, without those below the agents of other folders."""
    found = kernel.with_variable(environment.RUN_ID, run_ids) if run_ids else []
    if not found:
        return []
    others = {pid for pid, folder in find_holders(PREFIX, LOCK) if folder != reattach_folder}
    spared = {*others, *(pid for below in kernel.below(others).values() for pid in below)}
    return [process for process in found if process.pid not in spared]
