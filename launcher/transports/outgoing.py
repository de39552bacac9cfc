"""What a link writes: frames that must arrive, kept until confirmed; frames that need not; and the beats between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from launcher.transports.streams import Stream
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Beat
from worker_entry.protocol.resend_buffer import Outbox, is_counted
from worker_entry.system import clock

PASSING_LIMIT = 16
"""Uncounted frames that wait to be written: pieces of files, of which a node has four under way."""


class Outgoing:
    """Any thread adds frames; one thread at a time writes them, to the stream that is the link's at that moment.

    Args:
        beat_s: seconds between beats.
    """

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._outbox = Outbox()
        self._written = 0
        self._passing: deque[bytes] = deque()
        """Frames that are not counted: their receiver asks again for what it misses."""
        self._stream: Stream | None = None
        self._finishing = False
        self._beat_at_once = False
        self._beat_due = time.monotonic() + beat_s
        self._changed = threading.Condition()
        self._stamp: float | None = None
        """That of the last answer to a beat."""

    @property
    def received(self) -> int:
        """Counted frames that have come from the other side."""
        return self._outbox.received

    @property
    def is_finishing(self) -> bool:
        return self._finishing

    def add(self, message: Message, body: bytes) -> None:
        """Queues a frame; beyond the limit, an uncounted one is dropped."""
        frame = encode(message, body)
        with self._changed:
            if is_counted(message):
                self._outbox.add(frame)
            elif len(self._passing) < PASSING_LIMIT:
                self._passing.append(frame)
            self._changed.notify_all()

    def finish(self) -> None:
        """Closes the stream once everything is written."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

    def attach(self, stream: Stream, *, received: int | None = None) -> None:
        """From now on frames go to this stream; after a break, from the first that the other side has not received."""
        with self._changed:
            if received is not None:
                self._outbox.confirm(received)
                self._written = received
            self._stream, self._beat_due = stream, time.monotonic() + self._beat_s

    def detach(self, *, breaks: bool = False) -> Stream | None:
        """Takes the stream away, whose writer then ends; `breaks`: another one will follow."""
        with self._changed:
            stream, self._stream = self._stream, None
            if breaks:
                self._passing.clear()
            self._changed.notify_all()
        return stream

    def is_attached(self, stream: Stream) -> bool:
        return self._stream is stream

    def count_received(self) -> None:
        """Notes that a counted frame has come from the other side."""
        self._outbox.received += 1

    def note_beat(self, beat: Beat) -> None:
        """Forgets what the other side has confirmed."""
        with self._changed:
            self._stamp = beat.stamp if beat.stamp is not None else self._stamp
            self._outbox.confirm(beat.received)

    def beat_soon(self) -> None:
        """Has a beat written at once."""
        with self._changed:
            self._beat_at_once = True
            self._changed.notify_all()

    def write_to(self, stream: Stream) -> None:
        """Writes to the stream for as long as it is the link's; runs in a thread of its own."""
        with contextlib.suppress(OSError):  # the reader sees the end as well, and says so
            while (data := self._next(stream)) is not None:
                stream.write(data)
            stream.finish()

    def _next(self, stream: Stream) -> bytes | None:
        with self._changed:
            # By the clock, and not after so much silence: without beats, the frames of a busy link would all be kept.
            self._changed.wait_for(lambda: self._has_news(stream), max(self._beat_due - time.monotonic(), 0.0))
            if self._stream is not stream:
                return None
            if time.monotonic() >= self._beat_due and not self._finishing:
                return self._beat()
            if self._written < self._outbox.last:
                frames = self._outbox.after(self._written)
                self._written = self._outbox.last
                return b"".join(frames)
            if self._passing:
                return self._passing.popleft()
            if self._finishing:
                return None
            return self._beat()

    def _beat(self) -> bytes:
        self._beat_at_once, self._beat_due = False, time.monotonic() + self._beat_s
        return encode(Beat(clock.now(), self._outbox.received, stamp=self._stamp))

    def _has_news(self, stream: Stream) -> bool:
        waiting = self._written < self._outbox.last or bool(self._passing)
        return self._stream is not stream or waiting or self._finishing or self._beat_at_once
