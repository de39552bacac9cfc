"""A real link in simulated time, against a far end that the test plays: each frame is sent when it has to be."""

from __future__ import annotations

import errno
import math
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from launcher.clock import Timing
from launcher.transports import streams
from launcher.transports.base import (
    LinkBroken,
    LinkClosed,
    LinkDropped,
    LinkError,
    LinkNews,
    LinkResumed,
    LinkTakenOver,
    Resumption,
)
from launcher.transports.frame_sender import PASSING_LIMIT
from launcher.transports.resumable_link import ResumableLink
from tests.harness.processes.agent_streams import READY
from tests.sim.storm.simulation import BEGAN, Process, SimulatedTiming, Simulation
from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import (
    Attached,
    Broken,
    Empty,
    KeptWarm,
    Listening,
    Log,
    Message,
    Prepared,
    Sampled,
)
from worker_entry.protocol.orders import AGENT_GONE, TAKEN_OVER, VERSION, Attach, Beat, Piece, Stop
from worker_entry.protocol.values import Problem

M = TypeVar("M", bound=Message)
LEASE_S = 60.0
RESUMPTION = Resumption(
    reattach_folder="/tmp/agent-x",
    run_id="run",
    generation=2,
    handled=3,
    attempt=4,
    offsets={"worker:0": 7},
    ready=replace(READY, process_view="view"),
    within_s=4.0,
)


class FarEnd:
    """A stream whose other side is the test."""

    archive = b""

    def __init__(self, timing: Timing, *, refuses: bool) -> None:
        self.heard: list[tuple[float, Message]] = []
        """What the link has sent, and when."""
        self.is_finished = self.is_abandoned = False
        self._timing = timing
        self._refuses = refuses
        self._items: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._decoder = Decoder()

    def read(self, size: int, timeout_s: float) -> bytes:
        del size
        try:
            data = self._timing.wait(self._items, timeout_s)
        except queue.Empty:
            raise LinkBroken(f"no data for {timeout_s:g} s") from None
        if data is None:
            raise LinkBroken("the connection broke")
        return data

    def write(self, data: bytes) -> None:
        if self._refuses:
            raise BrokenPipeError
        self.heard += [(self._timing.monotonic(), message) for message, _ in self._decoder.feed(data)]

    def finish(self) -> None:
        self.is_finished = True

    def abandon(self) -> None:
        self.is_abandoned = True
        self.put(None)

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None

    # --- for the test ---

    def put(self, data: bytes | None) -> None:
        """Lets bytes arrive; none: the agent's end; None: the connection breaks."""
        self._items.put(data)

    def say(self, *messages: Message) -> None:
        self.put(b"".join(map(encode, messages)))

    def of(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    @property
    def beats(self) -> list[float]:
        """When the link has sent beats."""
        return [time for time, message in self.heard if isinstance(message, Beat)]

    @property
    def orders(self) -> list[Message]:
        return [message for _, message in self.heard if not isinstance(message, Beat)]


class Course:
    """A link from its start on; it opens one far end after the other."""

    def __init__(
        self,
        *,
        lease_s: float = LEASE_S,
        resumption: Resumption | None = None,
        reopens: bool = True,
        same_clock: bool = False,
        end: Callable[[ResumableLink], int | None] | None = None,
    ) -> None:
        self.simulation = Simulation()
        self.process = Process(self.simulation, lambda: self.process.current.pause(math.inf))
        self.timing = SimulatedTiming(self.simulation, self.process)
        self.began = self.simulation.now
        self.ends: list[FarEnd] = []
        self.tries: list[tuple[float, float]] = []
        """When the link has tried to reconnect, and within which time."""
        self.fails = 0
        """How many of the next tries fail at once."""
        self.refuses = False
        """Whether the next far ends take nothing."""
        self.is_disk_full = False
        self.delivered: list[tuple[Message | LinkNews, int]] = []
        """With the numbers of their frames."""
        self.written: list[tuple[Message, bytes, float]] = []
        self.stored: list[tuple[FileRead, bytes]] = []
        self.link = ResumableLink(
            "n0",
            self._open,
            self._deliver,
            self,
            lease_s=lease_s,
            reopen=self._reopen if reopens else None,
            end=end,
            resumption=resumption,
            run_id="run",
            same_clock=same_clock,
            timing=self.timing,
        )

    def _open(self) -> FarEnd:
        if self.fails:
            self.fails -= 1
            raise LinkError("no route")
        self.ends.append(FarEnd(self.timing, refuses=self.refuses))
        return self.end

    def _reopen(self, within_s: float) -> FarEnd:
        self.tries.append((self.now, within_s))
        return self._open()

    def _deliver(self, node: str, message: Message | LinkNews, frame: int = 0, /) -> None:
        assert node == "n0"
        self.delivered.append((message, frame))

    def write(self, frame: Log, data: bytes, clock_offset_s: float = 0.0) -> bool:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append((frame, data, clock_offset_s))
        return True

    def store(self, part: FileRead, data: bytes) -> None:
        self.stored.append((part, data))

    # --- for the test ---

    @property
    def now(self) -> float:
        """Seconds since the link was made."""
        return self.simulation.now - self.began

    @property
    def end(self) -> FarEnd:
        """The latest one."""
        return self.ends[-1]

    @property
    def news(self) -> list[LinkNews]:
        return [message for message, _ in self.delivered if isinstance(message, LinkNews)]

    def let_pass(self, seconds: float = 0.01) -> None:
        self.simulation.run(lambda: False, self.simulation.now + seconds)

    def greet(self) -> None:
        """The agent starts."""
        self.let_pass()
        self.end.put(MARKER + encode(READY))
        self.let_pass()

    def reconnect(self, received: int = 0, first: int = 2) -> None:
        """The connection breaks; the agent accepts the next one."""
        self.end.put(None)
        self.let_pass()
        self.end.put(MARKER)
        self.let_pass()
        self.end.say(Attached(received, first))
        self.let_pass()

    def keep_alive(self, seconds: float) -> None:
        """Lets time pass, in which the agent says something every second."""
        for _ in range(round(seconds)):
            self.end.say(Sampled(0.0, []))
            self.let_pass(1.0)


@contextmanager
def course(**given: object) -> Iterator[Course]:
    made = Course(**given)  # type: ignore[arg-type]  # they are checked where they are taken
    try:
        yield made
    finally:
        made.process.kill()


def rounded(times: list[float]) -> list[float]:
    return [round(time, 1) for time in times]


# --- beats ---


@pytest.mark.parametrize(("lease_s", "beat_s"), [(LEASE_S, 2.0), (5.0, 1.0)])
def test_beats_come_at_once_and_then_at_fixed_times(lease_s: float, beat_s: float) -> None:
    with course(lease_s=lease_s) as run:
        run.let_pass(0.5)
        run.end.put(MARKER)
        run.let_pass(0.5)
        assert run.end.beats == []
        run.end.say(READY)
        run.keep_alive(4 * beat_s)
        began = 1.0 + run.began
        assert rounded(run.end.beats) == rounded([began, *(began + beat_s * number for number in range(1, 4))])


def test_orders_between_beats_do_not_delay_them() -> None:
    with course() as run:
        run.greet()
        for _ in range(50):
            run.link.send(Stop(1.0))
            run.end.say(Sampled(0.0, []))
            run.let_pass(0.2)
        assert len(run.end.beats) == 6
        assert len(run.end.orders) == 50


def test_a_beat_returns_the_last_stamp_and_the_first_answer_on_a_connection_is_answered_at_once() -> None:
    with course() as run:
        run.greet()
        [first] = run.end.of(Beat)
        assert first.time == pytest.approx(BEGAN + run.simulation.now, abs=0.1)
        assert (first.received, first.echo, first.stamp) == (0, None, None)
        run.end.say(Beat(0.0, 0, stamp=5.0))
        run.let_pass(0.1)
        assert [beat.stamp for beat in run.end.of(Beat)] == [None, 5.0]
        run.end.say(Beat(0.0, 0, stamp=6.0), Beat(0.0, 0))
        run.let_pass(0.1)
        assert len(run.end.beats) == 2
        run.let_pass(2.0)
        assert [beat.stamp for beat in run.end.of(Beat)] == [None, 5.0, 6.0]
        run.reconnect()
        assert [beat.stamp for beat in run.end.of(Beat)] == [6.0]
        run.end.say(Beat(0.0, 0, stamp=7.0))
        run.let_pass(0.1)
        assert [beat.stamp for beat in run.end.of(Beat)] == [6.0, 7.0]


def test_an_answer_without_a_stamp_is_not_answered() -> None:
    with course() as run:
        run.greet()
        run.end.say(Beat(0.0, 0))
        run.let_pass(0.1)
        assert len(run.end.beats) == 1


def test_a_beat_confirms_what_was_handled_and_never_less() -> None:
    with course() as run:
        run.greet()
        for handled in (1, 3, 2):
            run.link.confirm(handled)
            run.keep_alive(2.0)
        assert [beat.received for beat in run.end.of(Beat)] == [0, 1, 3, 3]


def test_a_link_that_finishes_sends_its_last_orders_and_then_neither_beats_nor_waits() -> None:
    with course() as run:
        run.greet()
        run.link.send(Stop(1.0))
        run.link.finish()
        run.let_pass()
        assert run.end.orders == [Stop(1.0)]
        assert run.end.is_finished
        beats = len(run.end.beats)
        run.keep_alive(5.0)
        assert len(run.end.beats) == beats
        run.end.put(b"")
        run.let_pass()
        assert run.news == [LinkClosed("the agent ended")]
        assert run.link.ended
        assert not run.end.is_abandoned


def test_a_link_that_finishes_reconnects_without_news() -> None:
    with course() as run:
        run.greet()
        run.link.finish()
        run.reconnect()
        assert run.news == []
        assert len(run.ends) == 2


@pytest.mark.parametrize(("lease_s", "reopens", "silence_s"), [(60.0, True, 10), (12.0, True, 6), (12.0, False, 12)])
def test_a_connection_counts_as_broken_after_a_silence(lease_s: float, reopens: bool, silence_s: int) -> None:
    with course(lease_s=lease_s, reopens=reopens) as run:
        run.greet()
        run.let_pass(silence_s - 0.1)
        assert run.news == []
        run.let_pass(0.2)
        reason = f"no data for {silence_s} s"
        assert run.news == [LinkDropped(reason) if reopens else LinkClosed(reason)]


# --- what comes from the agent ---


def test_only_counted_messages_have_a_number() -> None:
    with course() as run:
        run.greet()
        run.end.say(Sampled(0.0, []), Prepared(1, {}), Sampled(0.0, []), Empty(1, 0, 0))
        run.let_pass()
        numbers = [(type(message), frame) for message, frame in run.delivered]
        assert [kind.__name__ for kind, _ in numbers] == ["Ready", "Sampled", "Prepared", "Sampled", "Empty"]
        assert [frame for _, frame in numbers] == [1, 0, 2, 0, 3]
        assert run.link.agent_pid == READY.pid


def test_parts_of_files_are_stored_and_delivered_and_the_warm_state_is_kept() -> None:
    part, kept = FileRead(1, "model.keras", 0, 4, 4, 0), KeptWarm(60.0, [7], 0)
    with course() as run:
        run.greet()
        run.end.put(encode(part, b"data") + encode(kept))
        run.let_pass()
        assert run.stored == [(part, b"data")]
        assert [message for message, _ in run.delivered] == [READY, part]
        assert run.link.kept == kept


@pytest.mark.parametrize("same_clock", [False, True])
def test_pieces_of_logs_are_written_with_the_offset_of_the_clock(same_clock: bool) -> None:
    log = Log(1, "worker:0", 0, 2)
    with course(same_clock=same_clock) as run:
        run.greet()
        assert run.link.clock_offset_s == 0.0
        now = BEGAN + run.simulation.now
        run.end.say(Beat(now + 90.0, 0, echo=now - 8.0))  # it was under way for eight seconds
        run.end.put(encode(Beat(now + 40.0, 0, echo=now)) + encode(log, b"ok"))
        run.let_pass()
        [(frame, data, offset_s)] = run.written
        assert (frame, data) == (log, b"ok")
        assert offset_s == pytest.approx(0.0 if same_clock else 40.0, abs=0.1)
        assert [message for message, _ in run.delivered] == [READY]


def test_a_link_closes_with_the_result_of_its_end() -> None:
    ended: list[ResumableLink] = []

    def end(link: ResumableLink) -> int:
        ended.append(link)
        return 7

    with course(end=end) as run:
        assert run.link.close() == 7
        assert ended == [run.link]
    with course() as run:
        assert run.link.close() is None


def test_an_agent_may_be_silent_for_exactly_the_limit() -> None:
    with course() as run:
        run.greet()
        silent_s = run.simulation.now - run.link.last_heard
        run.link.drop_if_silent(silent_s)
        assert not run.link.join(0.0)
        run.let_pass(1.0)
        run.link.drop_if_silent(silent_s)
        assert run.link.join(0.0)
        assert run.link.given_up
        assert run.news == [LinkClosed("its agent did not answer for 1 s")]
        assert run.end.is_abandoned


def test_an_agent_whose_logs_cannot_be_written_is_given_up() -> None:
    with course() as run:
        run.is_disk_full = True
        run.greet()
        run.end.put(encode(Log(1, "worker:0", 0, 2), b"ok"))
        run.let_pass()
        assert run.news == [LinkClosed("its log cannot be written: No space left on device")]
        assert run.end.is_abandoned


def test_nothing_is_left_on_a_node_that_was_not_reached_or_started_no_agent() -> None:
    for is_reached in (False, True):
        with course() as run:
            run.fails = int(not is_reached)
            run.let_pass()
            if is_reached:
                run.end.put(b"")
            run.let_pass()
            assert run.news == [LinkClosed("the agent sent no start marker" if is_reached else "no route")]
            assert run.link.ended
            assert not run.link.began


def test_an_agent_that_does_not_start_in_time_may_have_left_something() -> None:
    with course() as run:
        run.let_pass(streams.FIRST_WORD_S + 0.1)
        assert run.news == [LinkClosed("the agent does not start: no data for 60 s")]
        assert not run.link.ended
        assert run.end.is_abandoned


# --- reconnecting ---


def test_a_new_connection_sends_what_has_not_arrived_and_no_parts_of_files() -> None:
    orders = [Stop(float(number)) for number in range(1, 5)]
    with course() as run:
        run.greet()
        run.end.say(Prepared(1, {}))
        for order in orders[:3]:
            run.link.send(order)
        run.let_pass()
        run.end.put(encode(Log(1, "worker:0", 0, 5), b"hello"))
        run.end.put(None)
        run.let_pass()
        for index in range(PASSING_LIMIT):
            run.link.send(Piece(index, 0, 1), b"x")
        run.link.send(orders[3])
        run.let_pass(3.0)
        run.end.put(MARKER)
        run.let_pass()
        [attach] = run.end.of(Attach)
        assert attach == Attach(VERSION, "/tmp/agent-x", 2, 1, {"worker:0": 5}, run_id="run")
        run.end.say(Attached(1, 3), Empty(1, 0, 0))
        run.let_pass()
        assert [message for message in run.end.orders if not isinstance(message, (Attach, Piece))] == orders[1:]
        dropped, resumed = run.news
        assert dropped == LinkDropped("the connection broke")
        assert isinstance(resumed, LinkResumed)
        assert resumed.after_s == pytest.approx(3.03, abs=0.05)
        assert run.delivered[-1] == (Empty(1, 0, 0), 3)


def test_parts_of_files_that_wait_when_a_connection_breaks_are_not_sent_over_the_next() -> None:
    with course() as run:
        run.greet()
        run.link.send(Piece(0, 0, 1), b"x")
        run.let_pass()
        assert run.end.orders == [Piece(0, 0, 1)]
        run.link.send(Piece(1, 0, 1), b"x")
        run.end.put(None)
        run.reconnect()
        assert run.end.of(Piece) == []


def test_a_connection_that_breaks_before_the_agent_has_a_folder_ends_the_link() -> None:
    with course() as run:
        run.let_pass()
        run.end.put(MARKER)
        run.let_pass()
        run.end.put(None)
        run.let_pass()
        assert run.news == [LinkClosed("the connection broke")]


def test_a_link_that_cannot_reconnect_ends_with_its_connection() -> None:
    with course(reopens=False) as run:
        run.greet()
        run.end.put(None)
        run.let_pass()
        assert run.news == [LinkClosed("the connection broke")]


@pytest.mark.parametrize("first", [1, 3])
def test_an_agent_that_goes_on_with_another_frame_ends_the_link(first: int) -> None:
    with course() as run:
        run.greet()
        run.reconnect(first=first)
        assert run.news[-1] == LinkClosed(f"the agent sent Attached with frame {first} after 1 [protocol-error]")
        assert run.end.is_abandoned


def test_a_report_before_attached_ends_the_link() -> None:
    with course() as run:
        run.greet()
        run.end.put(None)
        run.let_pass()
        run.end.put(MARKER + encode(Listening("worker:0", 1.0)))
        run.let_pass()
        assert run.news[-1] == LinkClosed("the agent sent Listening before Attached [protocol-error]")
        assert run.end.is_abandoned


@pytest.mark.parametrize(
    ("reference", "is_ended", "is_taken_over"),
    [(AGENT_GONE, True, False), (TAKEN_OVER, False, True), ("busy", False, False)],
)
def test_an_agent_that_refuses_a_connection_ends_the_link(reference: str, is_ended: bool, is_taken_over: bool) -> None:
    with course() as run:
        run.greet()
        run.refuses = True  # the reattachment has ended already, and its word is there to read
        run.end.put(None)
        run.let_pass()
        run.end.put(MARKER + encode(Broken(Problem(reference, "it refuses"))))
        run.let_pass()
        assert run.news[-1] == LinkClosed("it refuses (the connection broke)", is_taken_over)
        assert (run.link.ended, run.link.taken_over) == (is_ended, is_taken_over)


def test_tries_to_reconnect_have_pauses_that_double_up_to_a_limit_and_end_with_the_lease() -> None:
    with course(lease_s=30.0) as run:
        run.greet()
        run.fails = 1000
        run.end.put(None)
        broke = run.now
        run.let_pass(60.0)
        began = rounded([time - broke for time, _ in run.tries])
        assert began == [0.0, 0.5, 1.5, 3.5, 7.5, 12.5, 17.5, 22.5, 27.5, 30.0]
        assert rounded([within_s for _, within_s in run.tries]) == [*[10.0] * 7, 7.5, 2.5, 1.0]
        assert run.news[-1] == LinkClosed("the connection broke, and not reconnected within 30 s: no route")


@pytest.mark.parametrize(("lease_s", "try_s"), [(5.0, 3.0), (30.0, 10.0), (600.0, 20.0)])
def test_a_try_to_reconnect_takes_a_third_of_the_lease_within_limits(lease_s: float, try_s: float) -> None:
    with course(lease_s=lease_s) as run:
        run.greet()
        run.end.put(None)
        run.let_pass(try_s - 0.1)
        assert rounded([within_s for _, within_s in run.tries]) == [try_s]
        silent = run.end
        run.let_pass(0.7)
        assert silent.is_abandoned
        assert len(run.tries) == 2
        run.let_pass(lease_s + try_s)
        last = run.news[-1]
        assert isinstance(last, LinkClosed)
        assert f"not reconnected within {lease_s:g} s: the agent does not answer: no data for" in last.reason


def test_giving_up_abandons_the_try_under_way() -> None:
    with course() as run:
        run.greet()
        run.end.put(None)
        run.let_pass()
        run.link.abandon()
        assert run.end.is_abandoned
        run.let_pass(1.0)
        assert run.news[-1] == LinkClosed("the connection broke")
        assert len(run.tries) == 1


# --- taking over ---


def test_a_takeover_attaches_with_what_was_handled_and_continues_both_counts() -> None:
    with course(resumption=RESUMPTION) as run:
        run.let_pass()
        run.end.put(MARKER)
        run.let_pass()
        assert run.end.of(Attach) == [
            Attach(VERSION, "/tmp/agent-x", 3, 4, {"worker:0": 7}, 2, takeover=True, run_id="run", process_view="view")
        ]
        run.link.send(Stop(1.0))
        assert run.link.agent_pid == READY.pid
        run.end.say(Attached(9, 6), Empty(1, 0, 0))
        run.let_pass()
        assert run.delivered == [(LinkTakenOver(9), 0), (Empty(1, 0, 0), 6)]
        assert run.end.of(Stop) == [Stop(1.0)]
        assert [beat.received for beat in run.end.of(Beat)] == [5]
        run.reconnect(received=10, first=7)
        [attach] = run.end.of(Attach)
        assert (attach.received, attach.takeover, attach.generation) == (6, False, 2)
        assert run.end.of(Stop) == []


def test_a_takeover_that_reaches_nobody_ends_after_its_own_limit() -> None:
    with course(resumption=RESUMPTION) as run:
        run.fails = 1000
        run.let_pass(60.0)
        assert rounded([time for time, _ in run.tries]) == [0.0, 0.5, 1.5, 3.5, 4.0]
        assert run.news == [LinkClosed("its controller is gone, and not reconnected within 4 s: no route")]


@pytest.mark.parametrize(
    ("first", "news"),
    [(3, LinkClosed("the agent sent Attached with frame 3 after 3 [protocol-error]")), (4, LinkTakenOver(9))],
)
def test_a_takeover_accepts_only_an_agent_that_goes_on_after_what_was_handled(first: int, news: LinkNews) -> None:
    with course(resumption=RESUMPTION) as run:
        run.let_pass()
        run.end.put(MARKER + encode(Attached(9, first)))
        run.let_pass()
        assert run.news == [news]
