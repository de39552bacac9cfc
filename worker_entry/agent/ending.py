"""Finds this machine's agents by their reattach folders, and ends them; called by processes other than theirs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection

from worker_entry.agent.connection.reattach import GUARDIAN_FILE, PREFIX, RUN_FILE, SOCKET, bases, is_locked, read_note
from worker_entry.agent.evidence import Fate, find_agent, find_fate
from worker_entry.protocol.framing import encode
from worker_entry.protocol.orders import Goodbye
from worker_entry.system import kernel
from worker_entry.system.ownership import verify_private

CALL_S = 1.0
KILL_S = 5.0
"""How long killed processes may take to disappear."""


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
    """Asks the agents of these folders to end and waits for them; returns whether none is left that can be seen here.

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
    """Kills the guardian, but everything below it first: without the guardian nothing would stop those processes."""
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
    """The folder's guardian, if it lives and can be seen from here: a container has its own process numbers.

    With its agent, if the folder is gone: nothing then tells which of the two is which.
    """
    try:
        pid, started = map(int, read_note(path, GUARDIAN_FILE).split())
    except ValueError:
        return find_agent(path) if not os.path.exists(path) else []
    found = kernel.look_up(pid)
    return [found] if found is not None and found.started == started and is_locked(path) else []
