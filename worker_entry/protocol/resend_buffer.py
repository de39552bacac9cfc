"""Frames that must arrive although the connection may break: kept until the other side says that it has them.

Both sides count these frames from 1 on, each those that it sends and those that it gets; no number is sent with
them. Whoever comes back over a new connection says how many it has, and gets the others again. Beats are not
counted, and neither are log bytes and pieces of files, which have offsets, nor the frames by which the two meet again.
"""

from __future__ import annotations

from collections import deque

from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Attached, Log, Message
from worker_entry.protocol.orders import Attach, Beat, Piece

_UNCOUNTED = (Attach, Attached, Beat, Log, Piece)


def is_counted(message: Message) -> bool:
    return not isinstance(message, _UNCOUNTED)


class Outbox:
    """The counted frames of one side; `received` is how many came from the other."""

    def __init__(self) -> None:
        self.received = 0
        self.last = 0
        """The number of the newest frame."""
        self._frames: deque[bytes] = deque()

    def add(self, frame: bytes) -> None:
        self.last += 1
        self._frames.append(frame)

    def confirm(self, count: int) -> None:
        """The other side has the first `count` frames.

        Raises:
            ProtocolError: it cannot have them.
        """
        kept = self.last - len(self._frames)
        if count > self.last:
            raise ProtocolError(f"a confirmation of {count} frames, of which there are {self.last}")
        for _ in range(kept, count):
            self._frames.popleft()

    def after(self, count: int) -> list[bytes]:
        """The frames behind the first `count`.

        Raises:
            ProtocolError: some of them are gone, since it confirmed them.
        """
        kept = self.last - len(self._frames)
        if not kept <= count <= self.last:
            raise ProtocolError(f"{count} frames received, which is not within {kept} and {self.last}")
        return list(self._frames)[count - kept :]

    def take_back(self) -> None:
        """Forgets the newest frame, as if it had never been added."""
        self._frames.pop()
        self.last -= 1
