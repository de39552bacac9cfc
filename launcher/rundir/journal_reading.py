"""Reads `events.jsonl` of a run, even while the run writes it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.console.writer import Level

PIECE = 1 << 20

Entry = dict[str, Any]
"""One line: at least `time` (Unix seconds), `attempt` and `event`."""


class JournalReader:
    """A reader of complete lines. An `offset` skips the line that it falls into."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._begins_within = offset > 0

    def read(self) -> Iterator[Entry]:
        """Yields the entries since the last call; none if there is no file. Skips lines that are not entries."""
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
                        elif (entry := _parse(line)) is not None:
                            yield entry
        except OSError:
            return


def read_last_entries(path: Path, size: int = PIECE) -> tuple[list[Entry], JournalReader]:
    """Returns the entries in the last `size` bytes, and a reader for later entries."""
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


def said_text(entry: Entry) -> str:
    """The text of a `said` entry."""
    return str(entry.get("text", ""))


def said_level(entry: Entry) -> Level:
    """The level of a `said` entry; `note` if the level is unknown."""
    level = entry.get("level")
    return level if level in ("warning", "error") else "note"


def _parse(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
        return None
    is_time = isinstance(entry.get("time"), (int, float)) and not isinstance(entry["time"], bool)
    return entry if is_time else None
