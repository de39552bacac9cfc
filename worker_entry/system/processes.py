"""Starts processes that die with this one, and kills all processes below this one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Optional

from worker_entry.system import kernel

KILL_PAUSES_S = (0.005, 1.0)
"""Shortest and longest pause between rounds of KILL: a process that waits for a hanging disk cannot die at once."""
KILL_ROUNDS = 50
"""How often `kill_on_sight` is repeated against processes that respawn faster than all processes can be listed."""


def spawn(argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int, stdin: Optional[int] = None) -> int:
    """Starts a process in its own session; the process dies with this one. Its stdout and stderr go to `output`.

    Returns its pid; the caller must reap it.

    Raises:
        OSError: the process cannot be started (not found, not executable, arguments or environment too long).
    """
    import subprocess

    parent = os.getpid()
    process = subprocess.Popen(
        list(argv),
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        # Safe: this process has one thread, and the C library is already loaded.
        preexec_fn=lambda: kernel.die_with_parent(signal.SIGKILL, parent),
    )
    process.returncode = 0  # Popen must not wait for it
    return process.pid


def become_independent(kept: Collection[int] = ()) -> None:
    """Called in a forked child: resets signal handlers, and closes all descriptors but 0 to 2 and `kept`.

    The child must not keep a descriptor open that the parent closes: a held port would get a task's connections, a GPU
    would stay reserved, and the controller's connection would not end with the agent.
    """
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def end_children(pids: set[int]) -> None:
    """Kills these children, waits for their end, and empties the set."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kills all processes below this one, except for `spare` and their descendants, until no process is left."""
    me = os.getpid()
    untouchable: set[int] = set()
    pause_s = KILL_PAUSES_S[0]
    while True:
        found = kernel.descendants(me, spare=spare, unreaped=True)
        left = [process for process in found if process.pid not in untouchable]
        if not left:
            return
        for process in left:
            try:
                kernel.send_signal(process, signal.SIGKILL)
            except PermissionError:  # another user's process
                untouchable.add(process.pid)
        for process in left:
            with contextlib.suppress(ChildProcessError):  # an adopted orphan stays a zombie until it is reaped
                os.waitpid(process.pid, os.WNOHANG)
        kill_what_respawns(partial(kernel.kill_on_sight, me, {*spare, *untouchable}))
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, KILL_PAUSES_S[1])


def kill_what_respawns(kill_on_sight: Callable[[], set[int]]) -> set[int]:
    """Kills processes that respawn and exit before all processes can be listed; returns their pids."""
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        hit = kill_on_sight()
        if hit and hit <= killed:  # all of them are already dying
            break
        killed |= hit
    return killed
