"""Replaces files in one go: a reader never sees half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes the file; one that is there is replaced once the new one is on the disk.

    Args:
        path: the file.
        text: its content.
        mode: its permissions, less what the user's mask forbids.

    Raises:
        OSError: it cannot be written; what is there stays.
    """
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
