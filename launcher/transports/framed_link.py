"""The part of a link that is the same for every transport: it delegates to a ResumableLink."""

from __future__ import annotations

from launcher.transports.resumable_link import ResumableLink
from worker_entry.protocol.messages import KeptWarm, Message


class FramedLink:
    """A link without `close`; `base.Link` describes the methods. A subclass sets `_frames`."""

    _frames: ResumableLink

    @property
    def last_heard(self) -> float:
        return self._frames.last_heard

    @property
    def kept(self) -> KeptWarm | None:
        return self._frames.kept

    @property
    def clock_offset_s(self) -> float:
        return self._frames.clock_offset_s

    def send(self, message: Message, body: bytes = b"") -> None:
        self._frames.send(message, body)

    def confirm(self, frame: int) -> None:
        self._frames.confirm(frame)

    def drop_if_silent(self, limit_s: float) -> None:
        self._frames.drop_if_silent(limit_s)

    def abandon(self) -> None:
        self._frames.give_up()
