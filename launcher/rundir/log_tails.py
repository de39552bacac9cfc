"""Reads the first and last parts of task logs."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.console.log_lines import LogLines
from worker_entry.system.files import last_data

HEAD_BYTES = 1 << 20
"""Bytes of a log's beginning that are read while the cluster forms."""
TAIL_BYTES = 16 << 10
"""Bytes of a log's end that are read for its last lines."""

_ZEROS = re.compile(rb"\0{16,}")
"""The hole in a log that a program has extended by truncation."""


def read_head(path: Path) -> bytes:
    """The beginning of a log; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def find_size(path: Path) -> int:
    """The size of a log; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_lines(path: Path, count: int, *, fold: bool = True) -> list[str]:
    """Returns the last non-blank lines; `fold` drops TensorFlow's chatter; empty if the file is unreadable."""
    try:
        with path.open("rb") as file:
            begin, end = last_data(file.fileno())
            file.seek(max(begin, end - TAIL_BYTES))
            data = file.read(min(end - begin, TAIL_BYTES))
    except OSError:
        return []
    log = LogLines(fold=fold)
    lines = log.feed(_ZEROS.sub(b"", data.strip(b"\0"))) + log.close()
    return [line.decode("utf-8", "replace")[:400] for line in lines.split(b"\n") if line.strip()][-count:]
