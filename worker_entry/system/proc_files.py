"""Reads files of /proc and /sys, whose content is made when they are read."""

from __future__ import annotations

import os


def read_small(path: str) -> bytes:
    """A file of at most some kilobytes, with one read: half of the cost of `open`.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
