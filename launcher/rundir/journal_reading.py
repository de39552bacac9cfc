"""Reads `events.jsonl` of a run, even while the run writes it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from launcher.report.journal_line import Line, parse_lines

PIECE = 1 << 20


class JournalReader:
    """A reader of complete lines. An `offset` skips the line that it falls into."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._begins_within = offset > 0

    def read(self) -> Iterator[Line]:
        """Yields the lines since the last call; none if there is no file. Skips those that are malformed."""
        return parse_lines(self._read_lines())

    def _read_lines(self) -> Iterator[bytes]:
        rest = b""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self._offset)
                while data := file.read(PIECE):
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._offset += len(line) + 1
                        if self._begins_within:
                            self._begins_within = False
                        else:
                            yield line
        except OSError:
            return


def read_last_lines(path: Path, size: int = PIECE) -> tuple[list[Line], JournalReader]:
    """Returns the journal's lines in the last `size` bytes, and a reader for later lines."""
    try:
        offset = max(path.stat().st_size - size, 0)
    except OSError:
        offset = 0
    reader = JournalReader(path, offset)
    return list(reader.read()), reader


def open_regular(path: Path) -> int:
    """Opens a file for reading.

    Raises:
        OSError: the file cannot be read or is not regular (opening a named pipe would wait for a writer).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor
