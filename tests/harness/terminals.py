"""A command on its own terminal, as a user sees it: the screen, and the rows that have scrolled off it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyte

from launcher.console.terminal import TerminalSink
from tests.harness.polling import eventually

UNSET = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI")
_IN_SESSION = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.tcsetpgrp(0, os.getpgrp()); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Starts a session with this as its controlling terminal, as a terminal window does."""


class Screen(pyte.HistoryScreen):
    """pyte's screen, with two properties of other terminals.

    Its last rows and the cursor's line survive a lower height. After the last character of a full row, the cursor stays
    on this character, so that erasing the rest of the row erases it.
    """

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)
        super().erase_in_line(how, private)

    def erase_in_display(self, how: int = 0, *args: object, **kwargs: object) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)
        super().erase_in_display(how, *args, **kwargs)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        gone = max(self.cursor.y + 1 - (lines or self.lines), 0)
        for _ in range(gone):
            self.cursor.y, y = self.lines - 1, self.cursor.y
            super().index()
            self.cursor.y = y - 1
        cursor = self.cursor.y, self.cursor.x
        held = {y: self.buffer[y] for y in range(self.lines)}
        super().resize(lines, columns)
        for y in range(self.lines):
            self.buffer[y] = held.get(y, self.buffer[y])
        self.cursor.y, self.cursor.x = min(cursor[0], self.lines - 1), min(cursor[1], self.columns - 1)
        self.dirty.update(range(self.lines))


class Terminal:
    """Runs `argv` on a terminal of this size."""

    def __init__(
        self, argv: Sequence[str], *, columns: int = 80, rows: int = 24, cwd: Path | None = None, **env: str
    ) -> None:
        self.screen = Screen(columns, rows, history=100_000, ratio=0.5)
        self.writes: list[tuple[float, bytes]] = []
        """The time and the data of each read."""
        self._stream = pyte.ByteStream(self.screen)
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes = termios.tcgetattr(self.slave)
        """The terminal's modes before the command."""
        inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _IN_SESSION, *argv],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=cwd,
            env={**inherited, "TERM": "xterm-256color", **env},
        )

    def read(self) -> bool:
        """Shows all output so far on the screen; returns True, for use in conditions."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # on Linux, no process has the terminal open any more
                break
            self.writes.append((time.monotonic(), data))
            self._stream.feed(data)
        return True

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.writes)

    @property
    def display(self) -> list[str]:
        """The rows of the screen, without trailing blanks."""
        self.read()
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.display)

    @property
    def scrolled(self) -> list[str]:
        """All rows, including those that have scrolled off the screen."""
        shown = self.display
        above = ["".join(row[x].data for x in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return above + shown

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        self.read()
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, condition: Callable[[], bool]) -> None:
        """Reads until the condition holds; fails with the screen's text if it hangs."""

        def check() -> None:
            self.read()
            assert condition(), self.text

        eventually(check)

    def shows(self, *texts: str) -> None:
        """Waits until the screen shows all of these."""
        self.until(lambda: all(text in self.text for text in texts))

    def end(self) -> int:
        """Waits for the end of the command; returns its exit status."""
        self.until(lambda: self.process.poll() is not None)
        self.read()
        return self.process.returncode

    def hang_up(self) -> None:
        """Closes the terminal's window."""
        self.read()
        os.close(self.slave)
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self._master >= 0:
            self.hang_up()


@contextlib.contextmanager
def terminal(argv: Sequence[str], **options: object) -> Iterator[Terminal]:
    opened = Terminal(argv, **options)  # type: ignore[arg-type]  # mypy cannot tell the options apart
    try:
        yield opened
    finally:
        opened.close()


def screen_of(columns: int, rows: int, lines: Sequence[str]) -> Screen:
    """A terminal with one line of a log and, below it, these live lines."""
    screen = Screen(columns, rows)
    reading, writing = os.pipe()
    sink = TerminalSink(writing, term="xterm")
    sink.write(b"log\n")
    sink.show_live(lines)
    pyte.ByteStream(screen).feed(os.read(reading, 1 << 20).replace(b"log\n", b"log\r\n"))
    os.close(reading)
    os.close(writing)
    return screen
