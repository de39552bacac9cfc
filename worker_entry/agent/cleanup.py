"""Stops leftover processes of runs whose controller is gone: their agents, and orphans of their tasks.

Each task, like every process that it starts, has DISTLAUNCH_RUN_ID in its environment. Only distlaunch sets this
variable, whose value names one run. No other process is touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from typing import Union

from worker_entry.agent.connection.evidence import Fate, find_agent, find_fate, find_processes
from worker_entry.agent.connection.handover import receive
from worker_entry.agent.connection.reattach_folder import (
    GUARDIAN_FILE,
    LOCK,
    PREFIX,
    RUN_FILE,
    SOCKET,
    bases,
    is_locked,
    read_generation,
    read_note,
)
from worker_entry.protocol import environment
from worker_entry.protocol.framing import MARKER, encode
from worker_entry.protocol.messages import Broken, Cleaned
from worker_entry.protocol.orders import TAKEN_OVER, UNPROVEN, VERSION, Clean, Goodbye
from worker_entry.protocol.values import Problem
from worker_entry.system import kernel
from worker_entry.system.lock_holders import find_holders
from worker_entry.system.ownership import verify_private

AGENT_END_S = 15.0
GRACE_S = 2.0
"""The time between TERM and KILL."""
KILL_S = 5.0
"""How long killed processes may take to disappear."""
RESTORE_S = 5.0
"""How long an agent may take to notice that its folder was removed."""
CALL_S = 1.0


def main() -> int:
    """Reads a Clean order from stdin and answers it."""
    order = receive()
    stdout = sys.stdout.fileno()
    os.write(stdout, MARKER)
    if not isinstance(order, Clean) or order.version != VERSION:
        os.write(stdout, encode(Broken(Problem("protocol-error", "the agent expected Clean in its own version"))))
        return 1
    if order.warm:
        from worker_entry.agent.warm.offer import end_waiting

        os.write(stdout, encode(Cleaned(*end_waiting())))
        return 0
    if order.reattach_folder is None:
        os.write(stdout, encode(clean(order.run_ids)))
        return 0
    if order.generation is not None and order.generation < read_generation(order.reattach_folder):
        os.write(stdout, encode(Broken(Problem(TAKEN_OVER, "another controller has taken over the run"))))
        return 1
    answer = _clean_folder(order, order.reattach_folder)
    os.write(stdout, encode(answer))
    return 0 if isinstance(answer, Cleaned) else 1


def _clean_folder(order: Clean, reattach_folder: str) -> Union[Cleaned, Broken]:
    was_seen = find_fate(reattach_folder) is not Fate.UNKNOWN
    if not end_agents([reattach_folder] if reattach_folder else [], AGENT_END_S):
        return Broken(Problem("agent-alive", "the agent cannot be stopped"))
    cleaned = _stop(lambda: find_processes(reattach_folder, order.run_ids))
    is_proven = was_seen or find_fate(reattach_folder, order.process_view, order.run_ids) is Fate.ENDED
    if not cleaned.left and not is_proven:
        return Broken(Problem(UNPROVEN, "nothing proves that its last agent has ended"))
    return cleaned


def clean(run_ids: Collection[str]) -> Cleaned:
    """Stops every process of these runs."""
    _await_folders()
    agents = find_agents(run_ids)
    ended = len(agents) if end_agents(agents, AGENT_END_S) else 0
    cleaned = _stop(lambda: kernel.with_variable(environment.RUN_ID, run_ids))
    return Cleaned(ended + cleaned.ended, cleaned.left)


def _await_folders() -> None:
    """Waits until agents have restored folders that were removed: an agent's run is recorded only in its folder."""
    until = time.monotonic() + RESTORE_S
    while time.monotonic() < until and not all(os.path.exists(folder) for _, folder in find_holders(PREFIX, LOCK)):
        time.sleep(0.1)


def _stop(find: Callable[[], list[kernel.Process]]) -> Cleaned:
    """Stops the processes that are found, until none is found any more."""
    seen: set[int] = set()
    started = time.monotonic()
    while left := find():
        after_s = time.monotonic() - started
        if after_s > GRACE_S + KILL_S:
            break
        for process in left:
            if process.pid not in seen or after_s > GRACE_S:
                signum = signal.SIGKILL if after_s > GRACE_S else signal.SIGTERM
                kernel.send_signal(process, signum)
                if signum == signal.SIGTERM:
                    kernel.send_signal(process, signal.SIGCONT)
            seen.add(process.pid)
        time.sleep(0.02)
    pids = [process.pid for process in left]
    return Cleaned(len(seen - {*pids}), pids)


def find_agents(run_ids: Collection[str]) -> list[str]:
    """The reattach folders of these runs' living agents on this machine."""
    found = []
    for folder in bases():
        with contextlib.suppress(OSError):
            for name in os.listdir(verify_private(folder)):
                path = os.path.join(folder, name)
                if name.startswith(PREFIX) and read_note(path, RUN_FILE) in run_ids and is_locked(path):
                    found.append(path)
    return found


def end_agents(reattach_folders: Collection[str], within_s: float) -> bool:
    """Asks the agents of these folders to end and waits for them; returns whether none is visible any more.

    It also asks their guardians, which kill an agent that does not react, and finally kills what is left.
    """
    for path in reattach_folders:
        _say_goodbye(path)
        _signal_guardian(path, signal.SIGHUP, signal.SIGCONT)
    for ask, wait_s in ((lambda _: None, within_s), (_kill_guardian, KILL_S)):
        for path in filter(_is_alive, reattach_folders):
            ask(path)
        deadline = time.monotonic() + wait_s
        while any(map(_is_alive, reattach_folders)) and time.monotonic() < deadline:
            time.sleep(0.02)
    return not any(map(_is_alive, reattach_folders))


def _is_alive(path: str) -> bool:
    return find_fate(path) is Fate.ALIVE


def _say_goodbye(path: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.settimeout(CALL_S)
        call.connect(os.path.join(path, SOCKET))
        call.sendall(encode(Goodbye()))


def _kill_guardian(path: str) -> None:
    """Kills everything below the guardian, then the guardian, without which nothing would stop those processes."""
    for guardian in _find_guardian(path):
        for process in (*kernel.descendants(guardian.pid), guardian):
            with contextlib.suppress(OSError):
                kernel.send_signal(process, signal.SIGKILL)


def _signal_guardian(path: str, *signums: int) -> None:
    for guardian in _find_guardian(path):
        for signum in signums:
            with contextlib.suppress(OSError):
                kernel.send_signal(guardian, signum)


def _find_guardian(path: str) -> list[kernel.Process]:
    """The folder's guardian, if it lives and is visible here: a container has its own process numbers.

    If the folder is gone, returns guardian and agent, because nothing then distinguishes them.
    """
    try:
        pid, started = map(int, read_note(path, GUARDIAN_FILE).split())
    except ValueError:
        return find_agent(path) if not os.path.exists(path) else []
    found = kernel.look_up(pid)
    return [found] if found is not None and found.started == started and is_locked(path) else []
