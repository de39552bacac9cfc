"""Repaints or repeats the output of a command until Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence

import click

WATCH_S = 1.0


def can_repaint() -> bool:
    """Whether stdout is a terminal that can be repainted."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def find_width() -> int | None:
    """The width of the terminal that is stdout; None if stdout is no terminal: a pipe gets all columns."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def repaint(render: Callable[[int, int], Sequence[str]]) -> None:
    """Shows the lines on the terminal, once a second, until Ctrl-C; the last ones stay.

    `render` gets the terminal's columns and rows.
    """
    from launcher.console.keyboard import in_foreground, suspending
    from launcher.console.terminal import TerminalSink

    sink = TerminalSink(sys.stdout.fileno())
    lines: Sequence[str] = ()
    try:
        with suspending(sink.hide, lambda: None):
            while True:
                lines = render(*sink.size)
                if in_foreground(sys.stdout.fileno()):
                    sink.show_live(lines)
                time.sleep(WATCH_S)
    except KeyboardInterrupt:  # the way to leave
        pass
    finally:
        sink.close()
        click.echo("\n".join(lines))


def repeat(look: Callable[[], bool]) -> None:
    """Calls `look` once a second, until it returns False, the reader of stdout is gone, or Ctrl-C."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # reports only that the other end was closed
    try:
        while look() and not reader.poll(WATCH_S * 1000):
            pass
    except KeyboardInterrupt:
        pass
