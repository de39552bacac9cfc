"""The sending side of a link: counted frames, kept until confirmed; uncounted frames; and beats."""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial

from launcher.clock import Timing
from launcher.transports.streams import Stream
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Beat
from worker_entry.protocol.resend_buffer import ResendBuffer, is_counted

PASSING_LIMIT = 16
"""Uncounted frames that may wait to be written: file pieces, four of which a node requests at once."""


class FrameSender:
    """Any thread adds frames; one thread at a time writes them to the link's current stream.

    Args:
        beat_s: seconds between beats.
        timing: the link's clock and threads.
    """

    def __init__(self, beat_s: float, timing: Timing) -> None:
        self._beat_s = beat_s
        self._timing = timing
        self._outbox = ResendBuffer()
        self._handled = 0
        self._written = 0
        self._passing: deque[bytes] = deque()
        """Uncounted frames: the receiver requests missing ones again."""
        self._stream: Stream | None = None
        self._finishing = False
        self._beat_at_once = False
        self._beat_due = timing.monotonic() + beat_s
        self._changed = timing.make_condition()
        self._stamp: float | None = None
        """The stamp of the last answered beat."""
        self._renews = False
        """Whether no beat has been answered since the last `attach`."""

    @property
    def received(self) -> int:
        """How many counted frames have come from the other side."""
        return self._outbox.received

    @property
    def is_finishing(self) -> bool:
        return self._finishing

    def add(self, message: Message, body: bytes) -> None:
        """Queues a frame; drops an uncounted one beyond the limit."""
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
        """Sends frames to this stream from now on; after a break, starts with the first that was not received."""
        with self._changed:
            if received is not None:
                self._outbox.confirm(received)
                self._written = received
            self._stream, self._beat_due = stream, self._timing.monotonic() + self._beat_s
            self._renews = True

    def follow(self, received: int, handled: int) -> None:
        """Continues an earlier controller's counts: `received` of its frames arrived; it handled `handled` frames."""
        with self._changed:
            self._outbox.follow(received, handled)
            self._handled = handled

    def detach(self, *, breaks: bool = False) -> Stream | None:
        """Removes and returns the stream, whose writer then ends; `breaks`: another stream follows."""
        with self._changed:
            stream, self._stream = self._stream, None
            if breaks:
                self._passing.clear()
            self._changed.notify_all()
        return stream

    def count_received(self) -> None:
        """Counts a frame from the other side."""
        self._outbox.received += 1

    def confirm(self, count: int) -> None:
        """Notes that the first `count` frames from the other side were handled; the next beat says so."""
        self._handled = max(self._handled, count)

    def note_beat(self, beat: Beat) -> None:
        """Drops the frames that the other side has confirmed."""
        with self._changed:
            self._outbox.confirm(beat.received)
            if beat.stamp is not None:
                self._stamp = beat.stamp
                # Only the returned stamp renews the lease, which may be about to expire.
                self._beat_at_once, self._renews = self._beat_at_once or self._renews, False
                self._changed.notify_all()

    def beat_soon(self) -> None:
        """Sends a beat at once."""
        with self._changed:
            self._beat_at_once = True
            self._changed.notify_all()

    def start_writing(self, stream: Stream, name: str) -> None:
        """Writes to the stream while it is the link's current one, in a thread of this name."""
        try:
            self._timing.start(partial(self._write_to, stream), name)
        except RuntimeError:  # no more threads are allowed; the agent must not wait for a writer that does not exist
            stream.finish()
            raise

    def _write_to(self, stream: Stream) -> None:
        with contextlib.suppress(OSError):  # the reader sees the break too, and reports it
            while (data := self._next(stream)) is not None:
                stream.write(data)
            stream.finish()

    def _next(self, stream: Stream) -> bytes | None:
        with self._changed:
            # A beat is due by the clock, not after silence: without beats, a busy link would keep all of its frames.
            self._changed.wait_for(lambda: self._has_news(stream), max(self._beat_due - self._timing.monotonic(), 0.0))
            if self._stream is not stream:
                return None
            if self._timing.monotonic() >= self._beat_due and not self._finishing:
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
        self._beat_at_once, self._beat_due = False, self._timing.monotonic() + self._beat_s
        return encode(Beat(self._timing.now(), self._handled, stamp=self._stamp))

    def _has_news(self, stream: Stream) -> bool:
        waiting = self._written < self._outbox.last or bool(self._passing)
        return self._stream is not stream or waiting or self._finishing or self._beat_at_once
