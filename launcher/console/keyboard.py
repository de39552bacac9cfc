"""Single keys from the terminal, and Ctrl-Z, for a process that shares its terminal with a shell."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Iterator
from typing import Any

TERMINAL_TAKEN = {signal.SIGTTOU}
"""Held while the terminal is changed: if the shell takes it between our check and the change, the change would stop
this process."""


def in_foreground(descriptor: int) -> bool:
    """Whether this process may use the terminal, because it is not a background job of the shell."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not our session's terminal: no shell takes it from us
        return True


class Keyboard:
    """The terminal's keys, which can be read one by one while they are taken. Ctrl-C still interrupts.

    Without a terminal of our session, there are no keys. One thread takes the keys; a signal handler may give them back
    at any moment.
    """

    def __init__(self) -> None:
        self.readable: list[int] = []
        """The descriptor to read keys from; empty while the keys are not taken."""
        self._before: list[Any] | None = None
        self._is_given_back = False

    @property
    def exists(self) -> bool:
        """Whether our input is a terminal of our session."""
        try:
            os.tcgetpgrp(sys.stdin.fileno())
        except (OSError, ValueError, AttributeError):
            return False
        return True

    def take(self) -> None:
        """Takes the keys unless another program has the terminal, or they were given back."""
        if self.readable or self._is_given_back:
            return
        try:
            descriptor = sys.stdin.fileno()
            # In the background, changing the terminal would stop this process.
            if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) != os.getpgrp():
                return
            with held(TERMINAL_TAKEN):
                self._before = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor, termios.TCSANOW)
        except (OSError, ValueError, AttributeError, termios.error):
            return
        self.readable.append(descriptor)
        if self._is_given_back:  # by a signal handler meanwhile
            self.give_back()

    def give_back(self) -> None:
        """Restores the terminal, unless another program has it now and has changed its settings."""
        self._is_given_back = True
        if not self.readable:
            return
        descriptor = self.readable[0]
        self.readable.clear()
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(descriptor) == os.getpgrp():
                assert self._before is not None
                with held(TERMINAL_TAKEN):
                    termios.tcsetattr(descriptor, termios.TCSANOW, self._before)

    def allow(self) -> None:
        """Allows the keys to be taken again."""
        self._is_given_back = False


@contextlib.contextmanager
def single_keys() -> Iterator[Keyboard]:
    """Takes the keys; restores the terminal at the end."""
    keyboard = Keyboard()
    keyboard.take()
    try:
        yield keyboard
    finally:
        keyboard.give_back()


@contextlib.contextmanager
def suspending(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Calls `before` when Ctrl-Z is about to stop this process, and `after` whenever it continues. Main thread only."""
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:  # no shell with job control
        yield
        return

    def stop(*_: object) -> None:
        before()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        # To this thread, so that the signal takes effect before the next line runs.
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, stop)

    previous = signal.signal(signal.SIGCONT, lambda *_: after())
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.signal(signal.SIGCONT, previous)


@contextlib.contextmanager
def held(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Delays signals to this thread, and to threads that it starts, until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
