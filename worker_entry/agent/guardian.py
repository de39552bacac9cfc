"""The outer of an agent's two processes: it waits, and checks once a second whether the agent's loop still turns.

If the agent dies, even by SIGKILL, the guardian kills everything that is left below it. If the guardian dies, the
kernel signals the agent, which then stops everything itself.

The guardian kills a hanging agent (SIGSTOP, a disk that does not answer) and everything below it when the agent's loop
has not turned for the length of the lease, or within seconds if the guardian is asked to end and the agent does not
react. It does not continue a stopped agent: whatever stopped the agent can stop it again, and after the lease the
controller has given up the node and may have started the tasks elsewhere. For the same reason it kills an agent that
still runs some seconds after its lease has expired.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Optional

from worker_entry.agent.lease import HANG_S
from worker_entry.agent.liveness import TICK_S, HangTimer, LoopCounter
from worker_entry.agent.reattach import ReattachFolder
from worker_entry.protocol.values import TaskExit
from worker_entry.system import clock, kernel, processes
from worker_entry.system.engine import is_managed
from worker_entry.system.signal_wakeup import ENDING, wake_on_signals

FIRST_LIMIT_S = 60.0
"""How long an agent may take for a turn until it knows its lease."""
ENDING_LIMIT_S = 3.0
"""How long an agent may take for a turn once it was asked to end."""


def main(*, outlives_connection: bool) -> int:
    """Runs the guardian and, below it, the agent; returns the exit status: the agent's, or 128 + signal if it died.

    Args:
        outlives_connection: whether the agent waits for its controller to come back when stdin ends.
    """
    clock.share()
    kernel.become_subreaper()
    guardian = os.getpid()
    reattach_folder = ReattachFolder.make() if outlives_connection else None
    loop_counter = LoopCounter(FIRST_LIMIT_S)
    try:
        child = os.fork()
    except BlockingIOError:
        if reattach_folder is not None:
            reattach_folder.close(1)
        sys.stderr.write("no more processes can be started here; raise the limit (`ulimit -u`)\n")
        return 1
    if child == 0:
        kernel.die_with_parent(signal.SIGTERM, guardian)
        kernel.become_subreaper()
        status = 1
        try:
            from worker_entry.agent.loop import Agent  # here, so that the guardian stays small

            status = Agent(reattach_folder, loop_counter).run(sys.stdin.fileno(), sys.stdout.fileno())
        except BaseException:  # noqa: BLE001 - _exit would swallow it
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            _continue_parent(guardian)
            os._exit(status)
    status = _guard(child, loop_counter)
    if reattach_folder is not None:
        reattach_folder.close(status)
    return status


def _continue_parent(guardian: int) -> None:
    """Continues a guardian that a signal has stopped: it would not notice that the agent ends."""
    with contextlib.suppress(OSError):
        if os.getppid() == guardian:
            os.kill(guardian, signal.SIGCONT)


def _guard(agent: int, loop_counter: LoopCounter) -> int:
    # The controller must see end of file when the agent ends, not when the guardian ends.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    status = _wait(agent, loop_counter)
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    processes.kill_descendants()
    if status.code is not None:
        return status.code
    sys.stderr.write(f"the agent was ended by {status}\n")
    return 128 + (status.signal or 0)


def _wait(agent: int, loop_counter: LoopCounter) -> TaskExit:
    """How the agent ended. SIGKILL is also returned for an agent that hangs; the caller has yet to kill it."""
    hang_timer = HangTimer(loop_counter.turns, time.monotonic())
    ending = False

    def pass_on() -> None:
        nonlocal ending
        if not ending:
            ending = True
            hang_timer.restart()
        with contextlib.suppress(ProcessLookupError):  # it has just been reaped
            os.kill(agent, signal.SIGHUP)  # SIGTERM may be an engine's warning

    wake = wake_on_signals(pass_on, (lambda: None) if is_managed() else None)  # the agent gets warnings as well
    while True:
        status = _reap(agent)
        if status is not None:
            return status
        hang_timer.update(loop_counter.turns, time.monotonic())
        limit_s = min(ENDING_LIMIT_S, loop_counter.limit_s) if ending else loop_counter.limit_s
        if hang_timer.seconds > limit_s:
            sys.stderr.write(f"killing the agent, which has not responded for {hang_timer.seconds:.0f} s\n")
            return TaskExit(signal=signal.SIGKILL)
        if loop_counter.lease_end and clock.now() - loop_counter.lease_end > HANG_S:
            sys.stderr.write("killing the agent, which still runs although its lease has expired\n")
            return TaskExit(signal=signal.SIGKILL)
        if select.select([wake], [], [], TICK_S)[0]:
            os.read(wake, 4096)


def _reap(agent: int) -> Optional[TaskExit]:
    """How the agent ended, or None if it runs; reaps every other child that has ended as well."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == agent:
                return TaskExit.from_wait_status(wait_status)
            if pid == 0:
                return None
    return None
