"""Replaces files atomically: a reader never sees half of a file."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes the file; replaces an existing file once the new content is on the disk.

    Args:
        path: the file.
        text: its content.
        mode: its permissions, restricted by the user's umask.

    Raises:
        OSError: the file cannot be written; an existing file stays unchanged.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    # Exclusive: in a folder that others can write to, the name could be a link to a file of this user.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
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
