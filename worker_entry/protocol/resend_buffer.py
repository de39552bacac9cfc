"""Keeps frames that must arrive even if the connection breaks, until the other side confirms them.

Each side counts, from 1 on, the frames that it sends and those that it receives; the frames carry no number. Over a new
connection each side says how many frames it has received, and the other sends the rest again. Not counted are beats,
samples, log bytes and pieces of files, which have offsets, and the frames that resume the connection.

A controller confirms a frame only when it has handled it. So what it has received and not handled when it is killed
is still kept by the agent, for the controller that takes over; that one goes on with both counts.
"""

from __future__ import annotations

from collections import deque

from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Attached, Log, Message, Sampled
from worker_entry.protocol.orders import Attach, Beat, Piece

_UNCOUNTED = (Attach, Attached, Beat, Log, Piece, Sampled)


def is_counted(message: Message) -> bool:
    return not isinstance(message, _UNCOUNTED)


class Outbox:
    """The counted frames of one side; `received` is how many have arrived from the other."""

    def __init__(self) -> None:
        self.received = 0
        self.last = 0
        """The number of the newest frame."""
        self._frames: deque[bytes] = deque()

    @property
    def confirmed(self) -> int:
        """How many frames are not kept any more."""
        return self.last - len(self._frames)

    def add(self, frame: bytes) -> None:
        self.last += 1
        self._frames.append(frame)

    def confirm(self, count: int) -> None:
        """Drops the first `count` frames, which the other side has received.

        Raises:
            ProtocolError: so many frames were never sent.
        """
        if count > self.last:
            raise ProtocolError(f"a confirmation of {count} frames, but only {self.last} were sent")
        for _ in range(self.confirmed, count):
            self._frames.popleft()

    def after(self, count: int) -> list[bytes]:
        """The frames after the first `count`.

        Raises:
            ProtocolError: some of them are gone because they were confirmed, or so many were never sent.
        """
        confirmed = self.confirmed
        if not confirmed <= count <= self.last:
            raise ProtocolError(f"{count} frames received, which is not between {confirmed} and {self.last}")
        return list(self._frames)[count - confirmed :]

    def follow(self, sent: int, received: int) -> None:
        """Counts on from another sender's frames, of which `sent` have arrived; nothing of ours was sent yet."""
        self.last, self.received = sent + len(self._frames), received

    def take_back(self) -> None:
        """Forgets the newest frame, as if it had never been added."""
        self._frames.pop()
        self.last -= 1
