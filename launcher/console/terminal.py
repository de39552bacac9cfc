"""Outputs of the console's thread: a pipe, or a terminal with live lines at its bottom."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple, Protocol

FRAME_S = 0.25
"""The shortest time between two pictures."""
PENDING_LIMIT = 256 << 10
"""Bytes that may wait for the next picture; more bytes are written without a picture."""
SYNCHRONIZES = ("xterm", "tmux", "screen", "alacritty", "foot", "ghostty", "kitty", "wezterm")
"""TERM begins with one of these on terminals that support synchronized output, or ignore its private mode as ECMA-48
requires."""

_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_BEGIN, _END = b"\x1b[?2026h", b"\x1b[?2026l"
_ERASE_BELOW = b"\r\x1b[J"
_ERASE_REST = b"\x1b[K"
RESTORE = _END + _WRAP + _ERASE_BELOW + _SHOW_CURSOR
"""Restores a terminal whose live lines no other process can erase."""


class Size(NamedTuple):
    """The size of a terminal, in characters."""

    columns: int
    rows: int


_UNKNOWN = Size(0, 0)


class Sink(Protocol):
    """An output for text; raises OSError when the reader is gone."""

    has_live_lines: bool

    @property
    def size(self) -> Size:
        """The size of the terminal."""

    def write(self, text: bytes) -> None:
        """Writes whole lines of task output."""

    def note(self, text: str) -> None:
        """Writes one of our messages."""

    def is_due(self) -> bool:
        """Whether `show_live` would write now."""

    def show_live(self, lines: Sequence[str]) -> None:
        """Shows lines that are rewritten in place, below everything else."""

    def hide(self) -> None:
        """Erases the live lines immediately."""

    def forget(self) -> None:
        """Leaves the live lines as they are: the terminal belongs to another program now."""

    def close(self) -> None:
        """Restores the terminal."""


class NowhereSink:
    """Drops everything, because the reader of our output is gone."""

    has_live_lines = False

    @property
    def size(self) -> Size:
        return Size(80, 24)

    def write(self, text: bytes) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def is_due(self) -> bool:
        return False

    def show_live(self, lines: Sequence[str]) -> None:
        pass

    def hide(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainSink(NowhereSink):
    """Pipes and files; also a terminal, if only one of stdout and stderr is a terminal."""

    def __init__(self, stdout: IO[bytes], stderr: IO[str]) -> None:
        self._stdout = stdout
        self._stderr = stderr

    def write(self, text: bytes) -> None:
        rest = memoryview(text)
        while rest:
            written = self._stdout.write(rest)
            if written is None:  # another program made the pipe or terminal non-blocking
                select.select([], [self._stdout], [])
            else:
                rest = rest[written:]
        self._stdout.flush()

    def note(self, text: str) -> None:
        self._stderr.write(f"{text}\n")
        self._stderr.flush()


class TerminalSink(NowhereSink):
    """One terminal. Text waits for the next picture; one system call writes both.

    Between two pictures the cursor is at the start of the live lines. So the live lines can be erased without knowing
    how many rows they take, which changes if the terminal is resized.
    """

    has_live_lines = True

    def __init__(
        self, descriptor: int, *, clock: Callable[[], float] = time.monotonic, term: str | None = None
    ) -> None:
        self._descriptor = descriptor
        self._clock = clock
        self._synchronizes = (os.environ.get("TERM", "") if term is None else term).startswith(SYNCHRONIZES)
        self._pending: list[bytes] = []
        self._waiting = 0
        """Bytes in `_pending`."""
        self._shown: tuple[str, ...] = ()
        self._shown_size = _UNKNOWN
        self._due = 0.0

    @property
    def size(self) -> Size:
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:
            columns, rows = 0, 0
        return Size(columns or 80, rows or 24)

    def write(self, text: bytes) -> None:
        self._pending.append(text)
        self._waiting += len(text)
        if self._waiting > PENDING_LIMIT:
            self._draw((), cursor=b"")

    def note(self, text: str) -> None:
        self.write(f"{text}\n".encode("utf-8", "backslashreplace"))

    def is_due(self) -> bool:
        return not self._shown or self._clock() >= self._due

    def show_live(self, lines: Sequence[str]) -> None:
        size = self.size
        new = tuple(lines[: size.rows])
        if not self._pending and new == self._shown and (size == self._shown_size or not new):
            return
        if (new or self._shown) and self._clock() < self._due:
            return
        self._draw(new, cursor=_HIDE_CURSOR if new else _SHOW_CURSOR, size=size)

    def hide(self) -> None:
        self._draw((), cursor=_SHOW_CURSOR)

    def forget(self) -> None:
        if self._shown:
            self._shown = ()
            self._put(_SHOW_CURSOR)

    def close(self) -> None:
        self.hide()

    def _draw(self, lines: tuple[str, ...], *, cursor: bytes, size: Size = _UNKNOWN) -> None:
        """Erases the old lines, writes the waiting text and draws the new lines, in one write."""
        before, self._shown, self._shown_size = self._shown, lines, size
        text, self._pending, self._waiting = b"".join(self._pending), [], 0
        parts = [_ERASE_BELOW if before and (text or not lines) else b"", text]
        if lines:
            # Each row is erased before its text is written: after a full row, the cursor stays on the last character.
            *rows, last = [line.encode("utf-8", "backslashreplace") for line in lines]
            drawn = b"".join(_ERASE_REST + row + b"\r\n" for row in rows) + _ERASE_BELOW + last
            up = b"\x1b[%dA" % len(rows) if rows else b""
            parts = [cursor, *parts, _NO_WRAP, drawn, _WRAP, up, b"\r"]
            parts = [_BEGIN, *parts, _END] if self._synchronizes else parts
            self._due = self._clock() + FRAME_S
        elif before:
            parts.append(cursor)
        self._put(b"".join(parts))

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                select.select([], [self._descriptor], [])
