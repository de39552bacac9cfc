"""Keeps frames that must survive a broken connection until the other side confirms them.

Each side counts, from 1 on, the frames that it sends and the frames that it receives; the frames carry no number. On a
new connection, each side reports how many frames it has received, and its peer resends the rest. Not counted are
heartbeats, samples, the frames that resume the connection, and the one that may come before all others; nor are log
bytes, pieces of files and parts of stdin, which have offsets.

A controller confirms a frame only after handling it. So if a controller is killed, the agent still has the frames that
the controller received but did not handle. The next controller gets these frames and continues both counts.
"""

from __future__ import annotations

from collections import deque

from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Attached, Log, Message, Sampled
from worker_entry.protocol.orders import Attach, Beat, Early, Input, Piece

_UNCOUNTED = (Attach, Attached, Beat, Early, FileRead, Input, Log, Piece, Sampled)


def is_counted(message: Message) -> bool:
    return not isinstance(message, _UNCOUNTED)


class ResendBuffer:
    """The counted frames that one side sends; `received` counts the frames that have arrived from the other side."""

    def __init__(self) -> None:
        self.received = 0
        self.last = 0
        """The number of the newest frame."""
        self._frames: deque[bytes] = deque()

    @property
    def confirmed(self) -> int:
        """The number of frames that are no longer kept."""
        return self.last - len(self._frames)

    def add(self, frame: bytes) -> None:
        self.last += 1
        self._frames.append(frame)

    def confirm(self, count: int) -> None:
        """Drops the first `count` frames, which the other side has received.

        Raises:
            ProtocolError: fewer frames than that were sent.
        """
        if count > self.last:
            raise ProtocolError(f"a confirmation of {count} frames, but only {self.last} were sent")
        for _ in range(self.confirmed, count):
            self._frames.popleft()

    def after(self, count: int) -> list[bytes]:
        """Returns the frames after the first `count`.

        Raises:
            ProtocolError: some of these frames were confirmed and are gone, or fewer than `count` were sent.
        """
        confirmed = self.confirmed
        if not confirmed <= count <= self.last:
            raise ProtocolError(f"{count} frames received, which is not between {confirmed} and {self.last}")
        return list(self._frames)[count - confirmed :]

    def follow(self, sent: int, received: int) -> None:
        """Continues the counts of an earlier sender, of whose frames `sent` have arrived; we have sent none yet."""
        self.last, self.received = sent + len(self._frames), received

    def take_back(self, number: int) -> None:
        """Removes the frame with this number, which has not arrived, as if it had never been added."""
        del self._frames[number - self.confirmed - 1]
        self.last -= 1
