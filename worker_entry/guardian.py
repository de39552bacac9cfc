"""The outer of an agent's two processes, which only waits.

If the agent dies, by SIGKILL even, the guardian kills whatever is left below it. If the guardian dies, the agent is
told by the kernel and stops everything itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from worker_entry import clock, kernel, processes
from worker_entry.meeting import Meeting
from worker_entry.values import TaskExit


def main(*, outlives_connection: bool) -> int:
    """Runs the guardian and, below it, the agent; returns the exit status: the agent's, or 128 + signal if it died.

    Args:
        outlives_connection: whether the agent waits for its controller to come back when stdin ends.
    """
    clock.share()
    kernel.become_subreaper()
    guardian = os.getpid()
    meeting = Meeting.make() if outlives_connection else None
    try:
        child = os.fork()
    except BlockingIOError:
        if meeting is not None:
            meeting.close(1)
        sys.stderr.write("no more processes can be started here: raise the limit (`ulimit -u`)\n")
        return 1
    if child == 0:
        kernel.die_with_parent(signal.SIGTERM, guardian)
        kernel.become_subreaper()
        status = 1
        try:
            from worker_entry.agent import Agent  # here, so that the guardian stays small

            status = Agent(meeting).run(sys.stdin.fileno(), sys.stdout.fileno())
        except BaseException:  # noqa: BLE001 - _exit would swallow it
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = _guard(child)
    if meeting is not None:
        meeting.close(status)
    return status


def _guard(agent: int) -> int:
    # The controller has to see the end of the agent's output when the agent ends, not when the guardian does.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just been reaped
            os.kill(agent, signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, pass_on)
    status = None
    while status is None:
        pid, wait_status = os.waitpid(-1, 0)
        if pid == agent:
            status = TaskExit.from_wait_status(wait_status)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    processes.kill_descendants()
    if status.code is not None:
        return status.code
    sys.stderr.write(f"the agent was ended by {status}\n")
    return 128 + (status.signal or 0)
