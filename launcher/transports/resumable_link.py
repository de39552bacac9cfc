"""Frames over a byte stream that may break and be replaced; no frame is lost or duplicated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from launcher.clock import SystemTiming, Timing
from launcher.errors import DistlaunchError, as_ours
from launcher.transports import streams
from launcher.transports.base import (
    Deliver,
    FileSink,
    GoneError,
    LinkBroken,
    LinkClosed,
    LinkDropped,
    LinkError,
    LinkResumed,
    LinkTakenOver,
    Resumption,
)
from launcher.transports.frame_sender import FrameSender
from launcher.transports.reconnect import Reconnector
from launcher.transports.streams import NoAgentError, NoPythonError, Stream, bring_archive, skip_noise
from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.framing import Decoder, ProtocolError
from worker_entry.protocol.messages import Attached, Broken, KeptWarm, Log, Message, Ready, ToController
from worker_entry.protocol.orders import AGENT_GONE, TAKEN_OVER, VERSION, Attach, Beat
from worker_entry.protocol.resend_buffer import is_counted

BEAT_S = 2.0
SILENCE_S = 10.0
"""Silence after which an agent's stream counts as broken: agents answer every beat."""
SAMPLES = 30
"""Answered heartbeats that are kept; the fastest answer counts."""


class ResumableLink:
    """Frames over a stream: one thread opens the stream, reads and delivers; another writes.

    Args:
        node: the node's name, for `deliver`.
        open_stream: starts the agent; may be slow; raises LinkError if the node cannot be reached.
        reopen: reconnects to the running agent, within the given seconds; without it, a broken stream ends the link.
        end: stops the agent of this link, by force if necessary; see `Link.close`.
        deliver: gets everything except log bytes.
        mirror: gets log bytes.
        lease_s: how long the agent waits for its controller.
        resumption: the running agent that is taken over by `reopen`; then `open_stream` is not called.
        run_id: the agent's run.
        same_clock: whether the agent is on this machine.
        timing: the clock and the threads.
    """

    def __init__(
        self,
        node: str,
        open_stream: Callable[[], Stream],
        deliver: Deliver,
        mirror: FileSink,
        *,
        lease_s: float,
        reopen: Callable[[float], Stream] | None = None,
        end: Callable[[ResumableLink], int | None] | None = None,
        resumption: Resumption | None = None,
        run_id: str = "",
        same_clock: bool = False,
        timing: Timing | None = None,
    ) -> None:
        self._timing = timing or SystemTiming()
        self.began = resumption is not None
        """Whether the agent has sent its start marker."""
        self.ended = self.taken_over = False
        """Whether the agent is known to have ended, or to obey another controller."""
        self.kept: KeptWarm | None = None
        """The warm state that the agent keeps for the next run, as it has reported."""
        self.reattach_folder = resumption.reattach_folder if resumption is not None else None
        """The folder where a reattachment finds the agent, once the agent has reported it."""
        ready = resumption.ready if resumption is not None else None
        self.agent_pid = ready.pid if ready is not None else None
        self.process_view = ready.process_view if ready is not None else ""
        """Which processes the agent sees, once it has reported that."""
        self._run_id = resumption.run_id if resumption is not None else run_id
        self.generation = resumption.generation if resumption is not None else 0
        """The generation of this controller."""
        self._resumption = resumption
        """Set until the agent is taken over."""
        self._node = node
        self._open_stream = open_stream
        self._reconnector = Reconnector(reopen, self._timing)
        self._end = end
        self._deliver = deliver
        self._mirror = mirror
        self._lease_s = lease_s
        self._silence_s = min(SILENCE_S, lease_s / 2) if reopen is not None else lease_s
        self._outgoing = FrameSender(min(BEAT_S, lease_s / 5), self._timing)
        self._closing = threading.Lock()
        self._over = self._timing.make_event()
        self._last_heard = self._lost_at = self._timing.monotonic()
        self._dropped: str | None = None
        self._attempt = resumption.attempt if resumption is not None else 0
        self._offsets = dict(resumption.offsets) if resumption is not None else {}
        self._clock = None if same_clock else ClockOffset(self._timing)
        self._timing.start(self._run, f"read-{node}")

    def send(self, message: Message, body: bytes = b"") -> None:
        self._outgoing.add(message, body)

    def confirm(self, frame: int) -> None:
        """Notes that the agent's frames up to this number were handled."""
        self._outgoing.confirm(frame)

    def finish(self) -> None:
        """Closes our side once everything is written; an agent without a reattach folder takes that as our end."""
        self._outgoing.finish()

    def join(self, timeout_s: float) -> bool:
        """Waits until the agent's side has ended or was given up; returns whether it has."""
        return self._over.wait(timeout_s)

    def abandon(self) -> None:
        """Stops reconnecting."""
        self._reconnector.give_up()
        if (stream := self._outgoing.detach()) is not None:
            stream.abandon()

    def close(self) -> int | None:
        return self._end(self) if self._end is not None else None

    def drop_if_silent(self, limit_s: float) -> None:
        """Gives up an agent that sent nothing for `limit_s`, without waiting for its lease to expire."""
        silent_s = self._timing.monotonic() - self._last_heard
        if self.began and silent_s > limit_s and not self._over.is_set():
            self.abandon()
            self._close(f"its agent did not answer for {silent_s:.0f} s")  # the reader may be busy for a while

    @property
    def last_heard(self) -> float:
        """When the last data came from the agent, in monotonic seconds."""
        return self._last_heard

    @property
    def given_up(self) -> bool:
        return self._reconnector.given_up

    @property
    def clock_offset_s(self) -> float:
        """The node's clock minus ours."""
        return self._clock.offset_s if self._clock is not None else 0.0

    # --- reading ---

    def _run(self) -> None:
        try:
            reason = self._follow()
        except (LinkError, LinkBroken) as error:
            self.ended = self.ended or (isinstance(error, GoneError) and error.proven)
            reason = str(error)
        except (ProtocolError, ValueError, OverflowError) as error:
            reason = f"the agent sent {error}{' [protocol-error]' * self.began}"
        except Exception as error:  # noqa: BLE001 - a thread that died silently would leave the run waiting
            ours = as_ours(error)
            reason = ours.sentence if isinstance(ours, DistlaunchError) else f"a bug in distlaunch: {error!r}"
        self._close(reason)

    def _close(self, reason: str) -> None:
        """Ends the link and reports it, once."""
        with self._closing:
            if self._over.is_set():
                return
            self._over.set()
        if (stream := self._outgoing.detach()) is not None and not self.ended:  # nothing more is read from it
            stream.abandon()
        self._deliver(self._node, LinkClosed(reason, self.taken_over))

    def _follow(self) -> str:
        """Reads until the agent has ended, over one stream after another; returns how it ended."""
        stream, data = self._begin() if self._resumption is None else self._take_over(self._resumption)
        while True:
            self._last_heard = self._timing.monotonic()
            try:
                self._read(stream, data)
            except LinkBroken as broken:
                stream.abandon()
                stream, data = self._reconnect(broken)
            except BaseException:
                if self._dropped is not None:  # the agent has refused this stream, which has no writer yet
                    stream.abandon()
                raise
            else:
                self.ended = True
                return stream.how_ended()

    def _begin(self) -> tuple[Stream, bytes]:
        try:
            stream = self._open_stream()
        except LinkError:
            self.ended = True  # nothing was started on the node
            raise
        self._outgoing.attach(stream)  # so that it is abandoned if the link is given up
        try:
            bring_archive(stream, streams.FIRST_WORD_S, timing=self._timing)
            self._outgoing.start_writing(stream, f"write-{self._node}")
            data = skip_noise(stream, streams.FIRST_WORD_S, timing=self._timing)
        except (NoAgentError, NoPythonError):
            self.ended = True
            raise
        self.began, self._last_heard = True, self._timing.monotonic()
        return stream, data

    def _read(self, stream: Stream, data: bytes) -> None:
        decoder = Decoder(ToController)
        while True:
            for message, body in decoder.feed(data):
                if self._over.is_set():  # the link has been closed
                    raise LinkError("given up")
                if is_counted(message):
                    self._outgoing.count_received()
                self._take(stream, message, body)
            data = stream.read(1 << 18, self._silence_s)
            if not data:
                return
            self._last_heard = self._timing.monotonic()

    def _take(self, stream: Stream, message: Message, body: bytes) -> None:
        match message:
            case Attached():
                if self._dropped is None:  # a second Attached would start a second writer
                    raise ProtocolError("Attached without a reattachment")
                self._resume(stream, message)
            case Broken(problem) if self._dropped is not None:  # the answer to Attach
                self.ended = problem.reference == AGENT_GONE
                self.taken_over = problem.reference == TAKEN_OVER
                raise LinkError(f"{problem.message} ({self._dropped})")
            case _ if self._dropped is not None:
                raise ProtocolError(f"{type(message).__name__} before Attached")
            case Log():
                try:
                    if not self._mirror.write(message, body, self.clock_offset_s):
                        return
                except OSError as error:
                    raise LinkError(f"its log cannot be written: {error.strerror}") from None
                if message.attempt != self._attempt:
                    self._attempt, self._offsets = message.attempt, {}
                self._offsets[message.task] = message.offset + len(body)
            case KeptWarm():
                self.kept = message
            case Beat():
                if self._clock is not None:
                    self._clock.note(message)
                self._outgoing.note_beat(message)
            case _:
                if isinstance(message, FileRead):
                    self._mirror.store(message, body)
                if isinstance(message, Ready):
                    if message.version != VERSION:
                        raise ProtocolError(f"version {message.version} of the protocol; this is {VERSION}")
                    self.reattach_folder, self.process_view = message.reattach_folder, message.process_view
                    self.agent_pid = message.pid
                    self._outgoing.beat_soon()
                self._deliver(self._node, message, self._outgoing.received if is_counted(message) else 0)

    # --- reconnecting ---

    def _take_over(self, resumption: Resumption) -> tuple[Stream, bytes]:
        """A stream to the agent of an earlier controller, and the first bytes from it; raises like `_reconnect`."""
        self._dropped = "its controller is gone"
        return self._reconnect(LinkBroken(self._dropped), resumption.within_s)

    def _reconnect(self, broken: LinkBroken, within_s: float | None = None) -> tuple[Stream, bytes]:
        """A new stream to the same agent, and the first bytes from it.

        Raises:
            LinkError: the agent is gone, or no try succeeded in time.
        """
        within_s = within_s if within_s is not None else self._lease_s
        if not self._reconnector.exists or self.reattach_folder is None:
            raise LinkError(str(broken))
        self._outgoing.detach(breaks=True)
        if self._dropped is None:
            self._dropped, self._lost_at = str(broken), self._last_heard
            if not self._outgoing.is_finishing:
                self._deliver(self._node, LinkDropped(self._dropped))
        attach = Attach(
            version=VERSION,
            reattach_folder=self.reattach_folder,
            received=self._outgoing.received if self._resumption is None else self._resumption.handled,
            attempt=self._attempt,
            offsets=self._offsets,
            generation=self.generation,
            takeover=self._resumption is not None,
            run_id=self._run_id,
            process_view=self.process_view,
        )
        return self._reconnector.find(broken, attach, self._last_heard + within_s, within_s)

    def _resume(self, stream: Stream, attached: Attached) -> None:
        resumption = self._resumption
        handled = resumption.handled if resumption is not None else self._outgoing.received
        # An agent drops frames that were handled, even if no record says so; it keeps all later ones.
        if attached.first <= handled or (resumption is None and attached.first > handled + 1):
            raise ProtocolError(f"Attached with frame {attached.first} after {handled}")
        self._dropped = self._resumption = None
        if resumption is not None:
            self._outgoing.follow(attached.received, attached.first - 1)
        self._outgoing.attach(stream, received=attached.received)
        self._outgoing.start_writing(stream, f"write-{self._node}")
        self._outgoing.beat_soon()
        if resumption is not None:
            self._deliver(self._node, LinkTakenOver(attached.received))
        elif not self._outgoing.is_finishing:
            self._deliver(self._node, LinkResumed(self._timing.monotonic() - self._lost_at))


class ClockOffset:
    """How far a node's clock is off, from its answers to the controller's heartbeats."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)

    def note(self, beat: Beat) -> None:
        if beat.echo is not None:
            now = self._timing.now()
            self._samples.append((now - beat.echo, beat.time - (beat.echo + now) / 2))

    @property
    def offset_s(self) -> float:
        """The node's clock minus the controller's; 0 before the first answer."""
        return min(self._samples, default=(0.0, 0.0))[1]
