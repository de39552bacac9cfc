"""Opens the console of this process: live and coloured on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from launcher.console.terminal import PlainSink, TerminalSink
from launcher.console.writer import Console
from launcher.report.journal_line import Level
from launcher.tasks import TaskId


def open_console(
    tasks: Sequence[TaskId],
    *,
    verbose: bool,
    record: Callable[[Level, str], None] = lambda _level, _text: None,
    needed: bool = True,
    live: bool = False,
) -> Console:
    """The console of this process; `live`: with the live view, where `can_be_live`."""
    stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
    if not is_terminal():
        # Not sys.stdout and sys.stderr: Python flushes them at exit, waits for a stuck reader and complains about a
        # reader that is gone.
        plain = PlainSink(
            os.fdopen(stdout, "wb", buffering=0, closefd=False),
            os.fdopen(stderr, "w", encoding="utf-8", errors="backslashreplace", closefd=False),
        )
        return Console(plain, tasks, verbose=verbose, record=record, needed=needed)
    # Imported here: a pipe needs no rich.
    from launcher.console.keyboard import in_foreground
    from launcher.console.live_view import LiveRegion

    colour = has_colour()
    region = LiveRegion(colour=colour) if live and can_be_live() else None
    return Console(
        TerminalSink(stdout),
        tasks,
        colour=colour,
        verbose=verbose,
        record=record,
        needed=needed,
        region=region,
        is_ours=partial(in_foreground, stdout),
    )


def is_terminal() -> bool:
    """Whether all of our output goes to one terminal that understands control sequences."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        return False
    return os.fstat(sys.stdout.fileno()).st_rdev == os.fstat(sys.stderr.fileno()).st_rdev


def can_be_live() -> bool:
    """Whether a redrawn picture makes sense: on a terminal, but not in CI, which records every redraw."""
    return is_terminal() and os.environ.get("CI", "").lower() in ("", "0", "false")


def has_colour() -> bool:
    return not os.environ.get("NO_COLOR")
