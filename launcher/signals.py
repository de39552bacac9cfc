"""The signals by which the user or the system asks a run to stop, or to show its stacks."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STACKS_SIGNAL = signal.SIGUSR1
"""Asks for the stacks of all tasks."""
LOST_S = 1.0
"""How long an exception may take to end the work that it interrupts."""


class Interruption(BaseException):
    """A signal asked the run to stop during its preparation; not an error, like KeyboardInterrupt."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Interrupts:
    """The signals of one run, caught before other processes can see the run, so that none is lost.

    `install` comes first. Within `raising`, the first signal that asks to stop raises Interruption. After
    `deliver_to`, its function gets all signals, earlier ones first. `mute` or `restore` comes last.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._early: list[tuple[int, bool]] = []
        """Signals that nothing has handled yet, and whether each is a request."""
        self._raises = False
        self._raised: int | None = None
        """The signal for which Interruption was raised in the current slow work."""
        self._is_lost = False
        """Whether the work continues although Interruption was raised in it."""
        self._timer: threading.Timer | None = None
        self._hangup_counts = True
        self._deliver: Callable[[int, bool], None] | None = None

    def install(self) -> None:
        for signum in (*SIGNALS, STACKS_SIGNAL):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # `nohup distlaunch …`
            self._previous[signum] = signal.signal(signum, self._handle)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """For slow work that starts no process, or only processes that end by themselves; see `asked` for other work.

        Interruption is raised once, and only here. If the work ends with another error after that, the error is a
        consequence: a library may turn exceptions into its own, and so does Python (a SystemError) if a second signal
        arrives while the first one's exception propagates. If the work continues, the exception was lost (Python
        ignores those in finalizers and weak references' callbacks, such as those of imports), and is raised again.
        """
        self._raises, self._raised = True, None
        try:
            for signum, _ in self._early:
                self._raise(signum)
            yield
        except Exception as error:
            if self._raised is None:
                raise
            raise Interruption(self._raised) from error
        finally:
            self._raises = self._is_lost = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    @property
    def asked(self) -> int | None:
        """The first signal that has asked to stop, if nothing has handled it yet.

        For slow work that starts processes: an exception during the start of a process would leave the process behind.
        """
        return next((signum for signum, _ in self._early if signum in SIGNALS), None)

    def deliver_to(self, deliver: Callable[[int, bool], None]) -> None:
        """Passes each signal to `deliver`, and whether it is a request of the user and thus not from an engine."""
        self._deliver = deliver
        while self._early:
            deliver(*self._early.pop(0))

    def ignore_hangup(self) -> None:
        """Ignores SIGHUP from now on: the run has left its terminal. Any thread may call it, unlike `signal.signal`."""
        self._hangup_counts = False

    def ask(self, signum: int) -> None:
        """Has the effect of the signal, as a request of the user; any thread may call it."""
        if not self._counts(signum):
            return
        if self._deliver is not None:
            self._deliver(signum, True)
        elif self._raises and self._previous:
            _thread.interrupt_main(signal.Signals(signum))  # only the main thread's slow work can be interrupted
        else:
            self._early.append((signum, True))

    def mute(self) -> None:
        """Ignores all signals, also at interpreter exit: the run has ended, and its exit status is final."""
        for signum in self._previous:
            signal.signal(signum, signal.SIG_IGN)

    def restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _counts(self, signum: int) -> bool:
        if signum != signal.SIGHUP:
            return True
        return self._hangup_counts and (signum in self._previous or not self._previous)

    def _handle(self, signum: int, _frame: object) -> None:
        if not self._counts(signum):
            return
        if self._deliver is not None:
            self._deliver(signum, False)
            return
        if self._is_lost:
            self._is_lost = False
            self._raise_now(signum)
        self._early.append((signum, False))
        self._raise(signum)

    def _raise(self, signum: int) -> None:
        if self._raises and signum in SIGNALS:
            self._raises, self._raised = False, signum
            self._raise_now(signum)

    def _raise_now(self, signum: int) -> NoReturn:
        self._timer = threading.Timer(LOST_S, self._raise_again, [signum, threading.get_ident()])
        self._timer.daemon = True
        self._timer.start()
        raise Interruption(signum)

    def _raise_again(self, signum: int, main: int) -> None:
        """Called in the timer's thread; `main`: the thread that does the work."""
        self._is_lost = True
        if self._timer is not None:
            signal.pthread_kill(main, signum)
