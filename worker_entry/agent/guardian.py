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
import socket
import sys
import time
from typing import Optional

from worker_entry.agent.connection.connection import Opening
from worker_entry.agent.connection.handover import attend
from worker_entry.agent.connection.lease import HANG_S, TICK_S, HangTimer, LoopCounter
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.warm.rendezvous import is_anyone_waiting
from worker_entry.protocol import environment
from worker_entry.protocol.values import TaskExit
from worker_entry.system import clock, kernel, processes
from worker_entry.system.engine import is_managed
from worker_entry.system.signal_wakeup import ENDING, wake_on_signals

FIRST_LIMIT_S = 60.0
"""How long an agent may take for a turn until it knows its lease."""
ENDING_LIMIT_S = 3.0
"""How long an agent may take for a turn once it was asked to end."""


def main(*, outlives_connection: bool, may_stay: bool = False) -> int:
    """Runs the guardian and, below it, the agent; returns the exit status: the agent's, or 128 + signal if it died.

    If an agent of an earlier run waits here, it serves this run, and this process only waits for the run's end.

    Args:
        outlives_connection: whether the agent waits for its controller to come back when stdin ends.
        may_stay: whether the agent may wait for another run after this one. Then guardian and agent are other
            processes, because this one ends with the run.
    """
    clock.share()
    news = ""
    if is_anyone_waiting():
        from worker_entry.agent.warm.offer import offer_connection

        answer = offer_connection(outlives=outlives_connection)
        if answer is not None and answer.call is not None:
            return attend(answer.call, answer.reattach_folder)
        news = answer.problem if answer is not None else ""
    opening, fingerprint = Opening(0, 1, outlives=outlives_connection), dict[str, str]()
    if may_stay and kernel.LINUX and not is_managed():
        from worker_entry.agent.warm.fingerprint import find_fingerprint
        from worker_entry.agent.warm.offer import receive_answer
        from worker_entry.system.own_environ import overwrite

        fingerprint = find_fingerprint()
        here, call = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if _fork():
            call.close()
            return attend(here, receive_answer(here).reattach_folder)
        here.close()
        os.setsid()
        overwrite(environment.RUN_ID)  # the run finds its processes by this variable, and must not find those that stay
        opening = Opening(0, 1, call, outlives_connection)
    kernel.become_subreaper()
    guardian = os.getpid()
    reattach_folder = ReattachFolder.make() if outlives_connection or fingerprint else None
    loop_counter = LoopCounter(FIRST_LIMIT_S)
    child = _fork(reattach_folder)
    if child == 0:
        kernel.die_with_parent(signal.SIGTERM, guardian)
        kernel.become_subreaper()
        status = 1
        try:
            from worker_entry.agent.serving import serve  # here, so that the guardian stays small

            status = serve(opening, reattach_folder, loop_counter, fingerprint, news=news)
        except BaseException:  # noqa: BLE001 - _exit would swallow it
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            _continue_parent(guardian)
            os._exit(status)
    if opening.call is not None:  # held by the agent alone: the socket's end then means the agent's
        opening.call.close()
    status = _guard(child, loop_counter)
    if reattach_folder is not None:
        reattach_folder.close(status)
    return status


def _fork(reattach_folder: Optional[ReattachFolder] = None) -> int:
    """Forks; returns the child's pid, or 0 in the child. If that fails, removes the folder and ends this process."""
    try:
        return os.fork()
    except BlockingIOError:
        if reattach_folder is not None:
            reattach_folder.close(1)
        sys.exit("no more processes can be started here; raise the limit (`ulimit -u`)")


def _continue_parent(guardian: int) -> None:
    """Continues a guardian that a signal has stopped: otherwise it would not notice that the agent ends."""
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
    """Returns how the agent ended; also returns SIGKILL for a hanging agent, which the caller then has to kill."""
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
        if loop_counter.lease_end and clock.steady(clock.now()) - loop_counter.lease_end > HANG_S:
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
