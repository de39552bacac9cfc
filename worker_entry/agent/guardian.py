"""The outer of an agent's two processes: it waits, and looks once a second whether the agent still takes turns.

If the agent dies, by SIGKILL even, the guardian kills whatever is left below it. If the guardian dies, the agent is
told by the kernel and stops everything itself.

An agent that hangs (SIGSTOP, a disk that does not answer) is killed, with everything below it, when it has taken no
turn for the lease; or within seconds, when the guardian is asked to end and the agent does not react. A stopped agent
is not continued: whatever stopped it can stop it again, and after the lease its controller has given the node up, and
may have started the tasks elsewhere. So is an agent that still goes on some seconds after the end of its lease.
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
from worker_entry.agent.liveness import TICK_S, Silence, Turns
from worker_entry.agent.reattach import ReattachFolder
from worker_entry.protocol.values import TaskExit
from worker_entry.system import clock, kernel, processes
from worker_entry.system.signal_wakeup import ENDING, wake_on_signals

FIRST_LIMIT_S = 60.0
"""How long an agent may take to its first turn, and between turns before it knows its lease."""
ENDING_LIMIT_S = 3.0
"""How long an agent that was asked to end may go without a turn."""


def main(*, outlives_connection: bool) -> int:
    """Runs the guardian and, below it, the agent; returns the exit status: the agent's, or 128 + signal if it died.

    Args:
        outlives_connection: whether the agent waits for its controller to come back when stdin ends.
    """
    clock.share()
    kernel.become_subreaper()
    guardian = os.getpid()
    reattach_folder = ReattachFolder.make() if outlives_connection else None
    turns = Turns(FIRST_LIMIT_S)
    try:
        child = os.fork()
    except BlockingIOError:
        if reattach_folder is not None:
            reattach_folder.close(1)
        sys.stderr.write("no more processes can be started here: raise the limit (`ulimit -u`)\n")
        return 1
    if child == 0:
        kernel.die_with_parent(signal.SIGTERM, guardian)
        kernel.become_subreaper()
        status = 1
        try:
            from worker_entry.agent.loop import Agent  # here, so that the guardian stays small

            status = Agent(reattach_folder, turns).run(sys.stdin.fileno(), sys.stdout.fileno())
        except BaseException:  # noqa: BLE001 - _exit would swallow it
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            _continue_parent(guardian)
            os._exit(status)
    status = _guard(child, turns)
    if reattach_folder is not None:
        reattach_folder.close(status)
    return status


def _continue_parent(guardian: int) -> None:
    """A guardian that a signal has stopped would not see that the agent ends."""
    with contextlib.suppress(OSError):
        if os.getppid() == guardian:
            os.kill(guardian, signal.SIGCONT)


def _guard(agent: int, turns: Turns) -> int:
    # The controller has to see the end of the agent's output when the agent ends, not when the guardian does.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    status = _wait(agent, turns)
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    processes.kill_descendants()
    if status.code is not None:
        return status.code
    sys.stderr.write(f"the agent was ended by {status}\n")
    return 128 + (status.signal or 0)


def _wait(agent: int, turns: Turns) -> TaskExit:
    """How the agent ended; if it hangs, it has yet to be killed, with all else."""
    silence = Silence(turns.number, time.monotonic())
    ending = False

    def pass_on() -> None:
        nonlocal ending
        if not ending:
            ending = True
            silence.forgive()
        with contextlib.suppress(ProcessLookupError):  # it has just been reaped
            os.kill(agent, signal.SIGTERM)

    wake = wake_on_signals(pass_on)
    while True:
        status = _reap(agent)
        if status is not None:
            return status
        silence.look(turns.number, time.monotonic())
        limit_s = min(ENDING_LIMIT_S, turns.limit_s) if ending else turns.limit_s
        if silence.seconds > limit_s:
            sys.stderr.write(f"the agent has done nothing for {silence.seconds:.0f} s, and is killed\n")
            return TaskExit(signal=signal.SIGKILL)
        if turns.lease_end and clock.now() - turns.lease_end > HANG_S:
            sys.stderr.write("the agent goes on after the end of its lease, and is killed\n")
            return TaskExit(signal=signal.SIGKILL)
        if select.select([wake], [], [], TICK_S)[0]:
            os.read(wake, 4096)


def _reap(agent: int) -> Optional[TaskExit]:
    """How the agent ended, if it has; whatever else has ended below is taken care of, too."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == agent:
                return TaskExit.from_wait_status(wait_status)
            if pid == 0:
                return None
    return None
