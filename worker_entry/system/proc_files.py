"""Reads files of /proc and /sys, whose content the kernel generates when they are read."""

from __future__ import annotations

import os
from typing import Optional


def read_small(path: str, folder: Optional[int] = None) -> bytes:
    """Reads a file of at most 4 KiB with a single read, at half the cost of `open`.

    Args:
        path: the file.
        folder: the descriptor of an open folder, to which the path is relative.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def read_whole(path: str) -> bytes:
    """Reads a file of any length.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as stream:
        return stream.read()
