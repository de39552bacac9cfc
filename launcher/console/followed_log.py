"""Reads a task's log file as it grows, without its long runs of zeros."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from launcher.console.log_lines import LogLines
from launcher.tasks import TaskId
from worker_entry.system.files import long_hole

PIECE = 64 << 10
"""Bytes of a log that one read takes."""
ZEROS = 512
"""The shortest run of zeros that is left out: a program that extends its log by truncation leaves terabytes of them."""


class FollowedLog:
    """One task's log from an offset on, with the position up to which it was read."""

    def __init__(self, task: TaskId, path: Path, label: bytes, lines: LogLines, offset: int = 0) -> None:
        self.task = task
        self.label = label
        self.lines = lines
        self.shown = offset
        """The offset up to which the log has been read."""
        self.progress = b""
        """The text of the unfinished line that was last shown."""
        self.unfinished_since: float | None = None
        """When the unfinished line was first seen or last shown; None if there is no unfinished line."""
        self._path = path
        self._zeros = 0
        self._file: IO[bytes] | None = None

    def read(self) -> bytes:
        """The next piece, without the zeros at its start and end; empty if there is none yet."""
        try:
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
                self._file.seek(self.shown)
            piece = self._file.read(PIECE)
            data = piece.lstrip(b"\0")
            zeros = len(piece) - len(data)
            if zeros < ZEROS and not self._zeros:
                data, zeros = piece, 0
            elif not data and len(piece) == PIECE:
                zeros = max(long_hole(self._file.fileno(), self.shown), PIECE)
            text = data.rstrip(b"\0")
            data = text if len(data) - len(text) >= ZEROS else data
            if len(data) < len(piece):
                self._file.seek(self.shown + zeros + len(data))
        except OSError:  # the task has not started yet, or too many files are open
            return b""
        self.shown += zeros + len(data)
        self._zeros += zeros
        if b"\n" in data:
            self.progress, self.unfinished_since = b"", None
        return data

    def take_zeros(self) -> int:
        """How many zeros were left out before the last piece; resets the count."""
        zeros, self._zeros = self._zeros, 0
        return zeros

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
