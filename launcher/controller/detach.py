"""A run that can leave its terminal: its controller is a child of the process that the user started.

That process waits until the controller leaves, or the run has ended. A run in the background has a session of its own
from the start, and leaves by itself once no user needs to watch it; until then its controller writes to the user's
terminal. A run in the foreground has the session and the process group of the waiting process, and leaves when the
user asks for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.console.terminal import RESTORE
from launcher.console.writer import Console
from launcher.errors import as_ours
from launcher.gang.state import AttemptState, Phase
from launcher.gang.waiting import render_waiting
from launcher.spec.strategies import TORCH
from worker_entry.protocol.values import NOT_IMPORTED

_LEFT = signal.SIGUSR2
"""The signal that a controller in the foreground sends when it has left."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1)
_WAITED_FOR = {*_PASSED_ON, _LEFT, signal.SIGCHLD, signal.SIGCONT}
WITHOUT_FRAMEWORK_S = 2.0
"""A background run leaves its terminal if all tasks have lived this long without importing a framework."""
FORMING_S = 10.0
"""A background run leaves its terminal when its cluster, whose nodes passed their checks, has formed this long."""


class Detachment:
    """The controller's side of a run that can leave its terminal.

    Args:
        pipe: leads to the waiting process.
        parent: in the foreground, a pipe that ends with the waiting process; -1 in the background.
        waiting: the pid of the waiting process.
        needs_cluster: in the background, whether the run leaves only once its cluster is up.
    """

    def __init__(self, pipe: int, parent: int = -1, waiting: int = -1, *, needs_cluster: bool = False) -> None:
        self._pipe = pipe
        self.parent = parent
        self._waiting = waiting
        self._needs_cluster = needs_cluster

    @property
    def is_background(self) -> bool:
        """Whether the run leaves by itself, rather than when the user asks for it."""
        return self.parent < 0

    def note(self, state: AttemptState, now: float, console: Console, directory: Path) -> None:
        """Leaves if a run in the background may leave in this state; `now`: Unix seconds."""
        if self._pipe < 0 or not self.is_background:
            return
        why = None if self._needs_cluster else find_departure(state, now)
        if why:
            console.note(why)
        if why or state.phase is Phase.RUNNING:
            self.leave(console, directory)

    def leave(self, console: Console, directory: Path) -> None:
        """Lets the waiting process end, and gives up its terminal."""
        if self._pipe < 0:
            return
        console.leave()
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2) if self.is_background else (0, 1, 2):
            os.dup2(devnull, descriptor)
        os.close(devnull)
        with contextlib.suppress(OSError):  # the waiting process may have been killed
            os.write(self._pipe, os.fsencode(directory))
        os.close(self._pipe)
        self._pipe = -1
        if not self.is_background:
            os.setsid()
            if os.getppid() == self._waiting:
                os.kill(self._waiting, _LEFT)


def run_detached(run: Callable[[Detachment], int], *, needs_cluster: bool) -> tuple[int | None, Path | None]:
    """Runs in a child process until the child leaves; in the child, returns the run's exit status at its end.

    Args:
        run: the run.
        needs_cluster: whether it leaves only once its cluster is up.

    Returns:
        The exit status of a run that has ended, or the folder of a run that has left.

    Raises:
        ProcessLimitError: no process can be started.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        child = os.fork()
    except OSError as error:
        raise as_ours(error) from None
    if child == 0:
        os.close(reading)
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        return run(Detachment(writing, needs_cluster=needs_cluster)), None
    os.close(writing)
    with _passing_signals(child), os.fdopen(reading, "rb") as pipe:
        directory = pipe.read()
        if directory:
            return None, Path(os.fsdecode(directory))
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), None


@contextlib.contextmanager
def _passing_signals(child: int) -> Iterator[None]:
    """Passes on Ctrl-C and SIGTERM: until it leaves, the run is the user's foreground command."""

    def pass_on(signum: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)  # safe: only this process reaps the child, so the pid is not reused

    previous = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def can_run_attached() -> bool:
    """Whether `run_attached` can be used: our input and output all belong to a terminal of our session."""
    try:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            os.tcgetpgrp(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    # Without sigwaitinfo (macOS), a signal to this process looks like a signal to its group.
    return hasattr(signal, "sigwaitinfo")


def run_attached(run: Callable[[Detachment], int]) -> tuple[int | None, Path | None]:
    """Runs in a child process, in the foreground, until the run has ended or the child leaves the terminal.

    The terminal sends the signals of Ctrl-C, Ctrl-Z and its end to both processes. This process passes on the signals
    that only it receives, and stops and exits in the same way as the child. The child treats the death of this process
    as the end of the terminal.

    Returns:
        The exit status of a run that has ended, or the folder of a run that has left.

    Raises:
        ProcessLimitError: no process can be started.
    """
    reading, writing = os.pipe()
    parent_end, waiting_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    waiting, restore = os.getpid(), _remember_terminal()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        child = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise as_ours(error) from None
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        os.close(waiting_end)
        return run(Detachment(writing, parent_end, waiting)), None
    os.close(writing)
    os.close(parent_end)
    status = _wait(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(reading, "rb") as pipe:
        if status is None:
            return None, Path(os.fsdecode(pipe.read()))
    if os.WIFSIGNALED(status):
        restore()
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status), None


def _wait(child: int) -> int | None:
    """Waits for the end of the child; returns its wait status, or None if it has left."""
    while True:
        info = signal.sigwaitinfo(_WAITED_FOR)
        if info.si_signo == _LEFT and info.si_pid == child:
            return None
        if info.si_signo == signal.SIGCONT:
            os.kill(child, signal.SIGCONT)
        # The child also receives the signals that the kernel sends, except for the end of the terminal: the kernel
        # sends SIGHUP only to the session leader, which is this process in a terminal without a shell.
        elif info.si_signo in _PASSED_ON and (info.si_code <= 0 or info.si_signo == signal.SIGHUP):
            os.kill(child, info.si_signo)
        # Polled after every signal: one SIGCHLD may stand for several.
        found, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if found and not os.WIFSTOPPED(status):
            return status
        if found and os.WSTOPSIG(status) != signal.SIGSTOP:  # a shell job stops as a whole, the child first
            os.kill(os.getpid(), os.WSTOPSIG(status))  # merges with the terminal's signal if that is still pending
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {os.WSTOPSIG(status)})
            signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
            os.kill(child, signal.SIGCONT)


def _remember_terminal() -> Callable[[], None]:
    """Returns a function that restores the terminal after the child was killed."""
    import termios

    descriptor = sys.stdin.fileno()
    attributes = termios.tcgetattr(descriptor)

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(descriptor) == os.getpgrp():
                termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
                os.write(sys.stdout.fileno(), RESTORE)

    return restore


def find_departure(state: AttemptState, now: float) -> str | None:
    """Why a run in the background leaves its terminal although its cluster is not up; None: not yet.

    Args:
        state: the attempt.
        now: Unix seconds by the controller's clock.
    """
    if state.lacks_gpus:
        return "The run waits in the background, and starts once the GPUs are free"
    if state.phase is not Phase.FORMING or not state.started:
        return None
    alone_s = now - max(event.time for event in state.started.values())
    is_whole = state.policy.tasks <= state.started.keys()
    if is_whole and alone_s >= WITHOUT_FRAMEWORK_S and not _has_framework(state):
        return "The tasks run, but have not imported TensorFlow; the run continues in the background"
    forming_s = now - min(event.time for event in state.started.values())
    if forming_s >= FORMING_S:
        return f"Not up after {forming_s:.0f} s, {render_waiting(state, now)}; the run continues in the background"
    return None


def _has_framework(state: AttemptState) -> bool:
    """Whether a task has begun to import a framework, or may have."""
    if state.listening or state.policy.strategy is TORCH:  # tasks do not report an import of PyTorch
        return True
    return any(status.phase != NOT_IMPORTED or status.strategy for status in state.status.values())
