"""Sends a part of a file to a pipe or socket without copying it through this process's memory."""

from __future__ import annotations

import os

COPIED = 64 << 10
"""How many bytes are copied at once if the kernel does not send the file itself."""


class FilePart:
    """`length` bytes of an open file from `offset`; its own descriptor stays open until `close`.

    If the file is truncated meanwhile, zeros replace the missing bytes: the receiver already expects `length` bytes.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._offset = offset
        self._length = length

    def __len__(self) -> int:
        """The number of bytes that have not been sent."""
        return self._length

    def __bytes__(self) -> bytes:
        return self._read(self._length)

    def send(self, target: int) -> int:
        """Sends as many bytes as `target` accepts; returns how many.

        Raises:
            OSError: as `os.write` does.
        """
        try:
            sent = os.sendfile(target, self._descriptor, self._offset, self._length)
        except BlockingIOError:
            raise
        except OSError:  # the kernel cannot send from this file to this target; any other failure recurs in `write`
            sent = 0
        if not sent:
            sent = os.write(target, self._read(COPIED))
        self._offset += sent
        self._length -= sent
        return sent

    def _read(self, limit: int) -> bytes:
        length = min(self._length, limit)
        return os.pread(self._descriptor, length, self._offset).ljust(length, b"\0")

    def close(self) -> None:
        os.close(self._descriptor)
