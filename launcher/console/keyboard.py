"""Single keys from the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def single_keys() -> Iterator[list[int]]:
    """The descriptor that each key can be read from at once, in a list; an empty one without a terminal.

    Ctrl-C still interrupts. The terminal is restored at the end.
    """
    try:
        descriptor = sys.stdin.fileno()
        # In the background, changing the terminal would stop this process.
        is_ours = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
        before = termios.tcgetattr(descriptor) if is_ours else None
    except (OSError, ValueError, AttributeError, termios.error):
        before = None
    if before is None:
        yield []
        return
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield [descriptor]
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
