"""Reads files of /proc and /sys, whose content is made when they are read."""

from __future__ import annotations

import os
from typing import Optional


def read_small(path: str, folder: Optional[int] = None) -> bytes:
    """A file of at most some kilobytes, with one read: half of the cost of `open`.

    Args:
        path: the file.
        folder: the descriptor of an open folder, which the path begins at.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def read_whole(path: str) -> bytes:
    """A file of any length.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as stream:
        return stream.read()
