"""Both sides ensure that nothing is lost or duplicated when the connection between them breaks."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launcher.transports import streams
from launcher.transports.base import LinkBroken, LinkClosed, LinkDropped, LinkNews, LinkResumed
from launcher.transports.frame_sender import PASSING_LIMIT
from launcher.transports.log_mirror import LogMirror
from launcher.transports.resumable_link import ResumableLink
from tests.harness.processes.agent_streams import ENTRY, READY, FarEnd, Pipes, beat_often
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import await_none_left, make_mark, wait_until
from worker_entry.agent.connection import handover as reattachments
from worker_entry.agent.connection import reattach_calls, reattach_folder
from worker_entry.agent.connection.reattach_calls import receive_call
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import (
    Attached,
    Broken,
    Empty,
    Exited,
    Listening,
    Log,
    Message,
    Prepared,
    Ready,
    Sampled,
    Started,
)
from worker_entry.protocol.orders import AGENT_GONE, VERSION, Attach, Beat, Goodbye, Hello, Piece, Prepare, Start, Stop
from worker_entry.protocol.values import Problem, Program, TaskExit, TaskRequest, TaskStart
from worker_entry.system import kernel

COVERS = (
    "launcher/transports",
    "worker_entry/agent/connection/connection.py",
    "worker_entry/agent/connection/lease.py",
    "worker_entry/agent/tasks/attempt.py",
    "worker_entry/protocol",
)


# --- the controller's side, against a scripted far end ---


class Controller:
    def __init__(self, targets: list[FarEnd], root: Path, lease_s: float = 20.0) -> None:
        self.delivered: list[Message | LinkNews] = []
        self._targets = iter(targets)
        self.mirror = LogMirror(lambda attempt, task: root / f"{attempt}-{task.replace(':', '-')}")
        self.frames = ResumableLink(
            "gpu-a",
            lambda: next(self._targets),
            lambda _, message, frame=0: self.delivered.append(message),
            self.mirror,
            lease_s=lease_s,
            reopen=lambda _: next(self._targets),
        )

    def wait_for(self, kind: type) -> None:
        wait_until(
            lambda: any(isinstance(message, kind) for message in self.delivered), f"{kind.__name__} is delivered"
        )


def test_agent_messages_are_delivered_once_wherever_the_stream_breaks(tmp_path: Path) -> None:
    log = encode(Log(1, "worker:0", 0, 5), b"hello")
    told: list[Message] = [Listening("worker:0", 1.0), Exited("worker:0", TaskExit(code=0), 2.0), Empty(1, 0, 0)]
    whole = encode(told[0]) + log + encode(told[1]) + encode(told[2])
    for cut in range(0, len(whole) + 1, 7):
        first, second = FarEnd(), FarEnd()
        controller = Controller([first, second], tmp_path)
        first.from_agent.put(MARKER + encode(READY) + whole[:cut])
        first.from_agent.put(None)
        second.from_agent.put(MARKER)
        attach = second.attach()
        done = attach.offsets.get("worker:0", 0)
        second.from_agent.put(
            encode(Attached(0, attach.received + 1)) + encode(Log(1, "worker:0", done, 5 - done), b"hello"[done:])
        )
        second.say(*told[attach.received - 1 :])
        second.from_agent.put(b"")
        controller.wait_for(LinkClosed)
        assert [m for m in controller.delivered if not isinstance(m, (Ready, LinkNews))] == told, cut
        controller.mirror.close()
        assert (tmp_path / "1-worker-0").read_bytes() == b"hello"
        (tmp_path / "1-worker-0").unlink()


def test_only_orders_that_the_agent_has_not_received_are_resent(tmp_path: Path) -> None:
    first, second = FarEnd(), FarEnd()
    controller = Controller([first, second], tmp_path)
    first.from_agent.put(MARKER + encode(READY))
    orders: list[Message] = [Prepare(1, [], number, number) for number in range(1, 5)]
    for order in orders:
        controller.frames.send(order)
    wait_until(lambda: first.heard() == orders, "all is sent")
    first.from_agent.put(None)
    second.from_agent.put(MARKER)
    second.attach()
    second.say(Attached(2, 2))
    controller.wait_for(LinkResumed)
    wait_until(lambda: second.heard()[1:] == orders[2:], "the rest is sent again")
    assert [type(m) for m in controller.delivered] == [Ready, LinkDropped, LinkResumed]
    controller.frames.abandon()


def test_a_link_closes_if_no_reconnect_succeeds_within_the_lease(tmp_path: Path) -> None:
    first = FarEnd()
    controller = Controller([first, *(FarEnd() for _ in range(50))], tmp_path, lease_s=1.0)
    first.from_agent.put(MARKER + encode(READY))
    first.from_agent.put(None)
    controller.wait_for(LinkClosed)
    assert "the connection broke, and not reconnected within 1 s" in str(controller.delivered[-1])


def test_heartbeats_are_sent_even_if_the_link_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats confirm received frames; they come at fixed times, even while other messages are sent."""
    beat_often(monkeypatch)
    first = FarEnd()
    controller = Controller([first], tmp_path)
    first.from_agent.put(MARKER + encode(READY))
    controller.wait_for(Ready)
    sent = 0

    def beats() -> int:
        return sum(isinstance(message, Beat) for message, _ in Decoder().feed(bytes(first.to_agent)))

    deadline = time.monotonic() + 20
    while beats() < 5 and time.monotonic() < deadline:
        controller.frames.send(Stop(1.0))
        sent += 1
        first.say(Beat(1.0, 0))  # it is alive
        wait_until(lambda count=sent: first.heard().count(Stop(1.0)) == count, "it is written")  # type: ignore[misc]
    assert beats() >= 5
    controller.frames.abandon()


def test_offsets_of_dropped_logs_are_not_kept(tmp_path: Path) -> None:
    first, second = FarEnd(), FarEnd()
    controller = Controller([first, second], tmp_path)
    controller.mirror.begin(2)
    first.from_agent.put(MARKER + encode(READY) + encode(Log(2, "worker:0", 0, 2), b"ok"))
    for number in range(100):
        first.from_agent.put(encode(Log(1, f"worker:{number}", 0, 1), b"x"))
    first.from_agent.put(None)
    second.from_agent.put(MARKER)
    attach = second.attach()
    assert (attach.attempt, attach.offsets) == (2, {"worker:0": 2})
    controller.frames.abandon()


def test_an_unrequested_attached_message_ends_the_link(tmp_path: Path) -> None:
    """Each such answer would start another thread that writes."""
    first = FarEnd()
    controller = Controller([first], tmp_path)
    first.from_agent.put(MARKER + encode(READY) + 1000 * encode(Attached(0, 2)))
    controller.wait_for(LinkClosed)
    assert "Attached without a reattachment [protocol-error]" in str(controller.delivered[-1])
    assert first.is_cut
    assert sum(thread.name == "write-gpu-a" for thread in threading.enumerate()) <= 1


def test_file_pieces_beyond_the_limit_are_dropped_while_a_node_stalls(tmp_path: Path) -> None:
    first, is_stuck, reads = FarEnd(), threading.Event(), threading.Event()
    controller = Controller([first], tmp_path)
    write, pieces = first.write, [Piece(index, 0, 1) for index in range(10 * PASSING_LIMIT)]

    def stuck(data: bytes) -> None:
        if data == encode(pieces[0], b"x"):
            is_stuck.set()
            assert reads.wait(30)
        write(data)

    first.write = stuck  # type: ignore[method-assign]
    first.from_agent.put(MARKER + encode(READY))
    controller.wait_for(Ready)
    controller.frames.send(pieces[0], b"x")
    assert is_stuck.wait(30)  # from now on, nothing leaves the queue
    for piece in pieces[1:]:
        controller.frames.send(piece, b"x")
    controller.frames.send(Stop(1.0))
    reads.set()
    kept = pieces[: 1 + PASSING_LIMIT]
    wait_until(lambda: Stop(1.0) in first.heard(), "what was kept and what follows is written")
    assert [message for message in first.heard() if isinstance(message, Piece)] == kept
    controller.frames.abandon()


def test_a_silent_agent_can_be_given_up_before_its_lease_ends(tmp_path: Path) -> None:
    first = FarEnd()
    controller = Controller([first], tmp_path, lease_s=600.0)
    first.from_agent.put(MARKER + encode(READY))
    controller.wait_for(Ready)
    controller.frames.drop_if_silent(30.0)
    assert controller.delivered == [READY]

    def is_given_up() -> bool:
        controller.frames.drop_if_silent(0.6)
        return controller.frames.join(0.0)

    wait_until(is_given_up, "it is given up")
    assert controller.delivered[1:] == [LinkClosed("its agent did not answer for 1 s")]
    first.say(Listening("worker:0", 1.0))
    wait_until(lambda: first.is_cut, "the stream is cut")
    assert len(controller.delivered) == 2


def test_an_agent_that_ended_before_a_reconnect_is_reported_as_ended(tmp_path: Path) -> None:
    first, second = FarEnd(), FarEnd()
    controller = Controller([first, second], tmp_path)
    first.from_agent.put(MARKER + encode(READY))
    first.from_agent.put(None)
    second.from_agent.put(MARKER + encode(Broken(Problem(AGENT_GONE, "its agent has ended"))))
    controller.wait_for(LinkClosed)
    assert controller.delivered[-1] == LinkClosed("its agent has ended (the connection broke)")
    assert controller.frames.ended


def test_an_agent_that_sends_nothing_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_WORD_S", 0.3)
    controller = Controller([FarEnd()], tmp_path)
    controller.wait_for(LinkClosed)
    assert controller.delivered == [LinkClosed("the agent does not start: nothing came")]


def test_an_agent_of_another_protocol_version_is_rejected(tmp_path: Path) -> None:
    end = FarEnd()
    controller = Controller([end], tmp_path)
    end.from_agent.put(MARKER + encode(replace(READY, version=VERSION + 1)))
    controller.wait_for(LinkClosed)
    assert f"version {VERSION + 1} of the protocol" in str(controller.delivered[-1])


def test_the_clock_offset_comes_from_the_fastest_answer(tmp_path: Path) -> None:
    end = FarEnd()
    controller = Controller([end], tmp_path)
    end.from_agent.put(MARKER + encode(READY))
    controller.wait_for(Ready)
    now = time.time()
    end.say(Beat(now + 100.0, 0, echo=now - 8.0))  # it took 8 s
    end.say(Beat(time.time() + 50.0, 0, echo=time.time()))
    wait_until(lambda: abs(controller.frames.clock_offset_s - 50.0) < 0.5, "the faster answer counts")
    controller.frames.abandon()


# --- a real agent, connected by a pair of pipes that can be cut ---


@pytest.mark.skipif(not kernel.LINUX, reason="looks for what is left in /proc")
@pytest.mark.parametrize("seed", range(2))
def test_a_real_agent_is_reattached_repeatedly_without_losing_output(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    mark = make_mark()
    used: list[Pipes] = []
    delivered: list[Message | LinkNews] = []

    def open_pipes(verb: str) -> Pipes:
        used.append(Pipes(verb, mark))
        return used[-1]

    mirror = LogMirror(lambda attempt, task: tmp_path / "mirror")
    link = ResumableLink(
        "gpu-a",
        lambda: open_pipes("node"),
        lambda _, message, frame=0: delivered.append(message),
        mirror,
        lease_s=30.0,
        reopen=lambda _: open_pipes("attach"),
    )
    code = "for i in $(seq 400); do echo line $i; sleep 0.004; done; head -c 3000000 /dev/zero; exit 7"
    program = Program("command", "sh", ["-c", code])
    link.send(Hello(VERSION, "test", str(tmp_path / "node"), str(tmp_path), 30.0, True))
    link.send(Prepare(1, [TaskRequest("worker:0", program)], 21000, 21999))
    link.send(Start(1, [TaskStart("worker:0", program)]))
    wait_until(lambda: any(isinstance(m, Started) for m in delivered), "the task has started")

    def is_over() -> bool:
        return any(isinstance(m, (Empty, LinkClosed)) for m in delivered)

    ended = False
    while not ended:
        known = len(used)
        time.sleep(chance.uniform(0.05, 0.5))  # at any moment of the run, on purpose
        used[-1].cut()
        wait_until(lambda n=known: len(used) > n or is_over(), "it comes back")  # type: ignore[misc]
        assert not any(isinstance(m, LinkClosed) for m in delivered), delivered[-5:]
        ended = any(isinstance(m, Exited) for m in delivered)
    link.send(Stop(0.0))
    wait_until(lambda: any(isinstance(m, Empty) for m in delivered), "the end is reported")
    link.send(Goodbye())
    link.finish()
    assert link.join(20)
    mirror.close()
    kinds = [type(m) for m in delivered if not isinstance(m, (LinkNews, Sampled))]
    assert kinds == [Ready, Prepared, Started, Exited, Empty]
    assert next(m for m in delivered if isinstance(m, Exited)).exit == TaskExit(code=7)
    written = tmp_path / "node" / "attempt-1" / "worker-0.log"
    assert_same_bytes((tmp_path / "mirror").read_bytes(), written.read_bytes())
    assert (tmp_path / "mirror").read_bytes().endswith(bytes(3_000_000))
    await_none_left(mark)


# --- a reattachment, for which the test plays the agent ---


@dataclass
class Visit:
    """A reattachment at a folder where the test is the agent."""

    place: reattach_folder.ReattachFolder
    way: Pipes

    def accept(self) -> reattach_calls.Reattachment:
        reattachment = receive_call(self.place.accept())
        assert isinstance(reattachment, reattach_calls.Reattachment)
        return reattachment

    @property
    def has_said(self) -> bytes:
        """What the process has written since the last look."""
        try:
            return self.way.read(1 << 16, 0.05)
        except LinkBroken:
            return b""

    def has_ended(self) -> bool:
        return self.way.process.poll() is not None


@pytest.fixture
def visit() -> Iterator[Visit]:
    place = reattach_folder.ReattachFolder.make()
    assert place is not None
    place.listen()
    way = Pipes("attach", {})
    way.write(encode(Attach(VERSION, place.path, 0, 0, {})))
    yield Visit(place, way)
    way.process.kill()
    way.process.wait()
    way.abandon()
    place.close(0)


def test_a_reattachment_writes_nothing_before_the_agent_does(visit: Visit) -> None:
    reattachment = visit.accept()
    assert visit.has_said == b""
    assert reattachment.take()
    assert visit.has_said == b""
    os.write(reattachment.stdout, MARKER)
    wait_until(lambda: visit.has_said == MARKER, "the agent's word arrives")
    reattachment.leave()


def test_a_pending_reattachment_ends_with_its_connection(visit: Visit) -> None:
    reattachment = visit.accept()
    visit.way.cut()
    wait_until(visit.has_ended, "it ends")
    assert not reattachment.take()
    reattachment.leave()


def test_a_reattachment_without_a_connection_does_not_call_the_agent(visit: Visit) -> None:
    visit.accept().leave()
    reading, writing = os.pipe()
    os.write(writing, encode(Attach(VERSION, visit.place.path, 0, 0, {})))
    os.close(writing)
    late = subprocess.run(
        [sys.executable, ENTRY, "attach"], stdin=reading, capture_output=True, timeout=30, check=False
    )
    os.close(reading)
    assert (late.returncode, late.stdout) == (1, b"")
    assert select.select([visit.place], [], [], 0.0)[0] == []


def test_a_replaced_reattachment_ends_like_a_broken_connection(visit: Visit) -> None:
    reattachment = visit.accept()
    assert reattachment.take()
    reattach_calls.release(reattachment.call, reattach_calls.NOT_NEEDED)
    assert visit.way.process.wait(30) == -signal.SIGKILL


def test_a_pending_reattachment_times_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert reattachments._await_word(theirs, time.monotonic() + 0.1) is None


@pytest.mark.skipif(not kernel.LINUX, reason="a reattachment's pid is not known")
def test_a_suspended_reattachment_ends_when_the_agent_refuses_it(visit: Visit) -> None:
    reattachment = visit.accept()
    assert reattachment.take()
    visit.way.process.send_signal(signal.SIGSTOP)
    reattachment.refuse(Problem("protocol-error", "nothing"))
    wait_until(visit.has_ended, "it ends")


def test_only_reattach_folders_of_killed_agents_are_removed(tmp_path: Path) -> None:
    first = reattach_folder.ReattachFolder.make()
    assert first is not None
    base = os.path.dirname(first.path)
    dead = os.path.join(base, "agent-dead")
    os.mkdir(dead, 0o700)
    Path(dead, "lock").touch()
    second = reattach_folder.ReattachFolder.make()
    assert second is not None
    try:
        assert not os.path.exists(dead)
        assert reattach_folder.is_locked(first.path)
        assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(base).st_mode) & 0o077 == 0
    finally:
        first.close(0)
        second.close(0)
    assert not os.path.exists(first.path)
