"""Limits the unauthenticated callers of a listening socket.

Any client can connect to a port and stay silent. So the number of such callers is limited, in total and for each
address, and each caller has one deadline for everything that it sends. New callers replace older ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import Any, Optional

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """A listening socket that keeps working when descriptors run out: it then closes the waiting connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.socket = listener
        listener.setblocking(False)  # who was waiting may be gone by now
        self._spare: Optional[int] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self) -> Optional[tuple[socket.socket, Any]]:
        """The next connection and its address; None if there is none now, or no descriptor for it.

        Raises:
            OSError: the socket is closed.
        """
        try:
            return self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._shed()
            return None

    def _shed(self) -> None:
        """Closes the connection that waits: it would wake its server again and again."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with contextlib.suppress(OSError):
            self.socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self.socket.close()
        self.release()

    def release(self) -> None:
        """Gives up the spare descriptor, and leaves the socket to its owner."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


class Callers:
    """Callers that have not authenticated yet.

    Args:
        limit: the maximum number of callers.
        per_address: the maximum number of callers from one address.
        within_s: the time limit of each caller.
    """

    def __init__(self, limit: int, per_address: int, within_s: float) -> None:
        self._limit = limit
        self._per_address = per_address
        self._within_s = within_s
        self._waiting: dict[socket.socket, tuple[str, float]] = {}
        """The address and the deadline of each caller; the oldest first."""

    def __contains__(self, caller: socket.socket) -> bool:
        return caller in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, caller: socket.socket, address: str, now: float) -> list[socket.socket]:
        """Adds a caller; removes and returns the callers that it displaces."""
        self._waiting[caller] = (address, now + self._within_s)
        places: dict[str, int] = {}
        for waiting, _ in self._waiting.values():
            places[waiting] = places.get(waiting, 0) + 1
        if places[address] > self._per_address:
            return self._remove_oldest(address)
        if len(self._waiting) > self._limit:
            return self._remove_oldest(max(places, key=lambda name: places[name]))
        return []

    def remove(self, caller: socket.socket) -> None:
        """Removes a caller that has authenticated, or is gone."""
        self._waiting.pop(caller, None)

    def take_overdue(self, now: float) -> list[socket.socket]:
        """Removes and returns the callers whose deadline has passed."""
        found = [caller for caller, (_, until) in self._waiting.items() if now >= until]
        for caller in found:
            self.remove(caller)
        return found

    def take_all(self) -> list[socket.socket]:
        return self.take_overdue(float("inf"))

    def _remove_oldest(self, address: str) -> list[socket.socket]:
        oldest = next(caller for caller, (waiting, _) in self._waiting.items() if waiting == address)
        self.remove(oldest)
        return [oldest]
