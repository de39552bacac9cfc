"""A node may report only its own tasks, in attempts that have begun; the amount of its unread messages is limited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launcher.controller.links import NodeLinks
from launcher.gang.events import Interrupted
from launcher.rundir.directory import RunDir
from launcher.tasks import TaskId
from launcher.transports.base import Deliver, FileSink, Link, LinkClosed, LinkDropped, Resumption
from launcher.transports.incoming import UNREAD_BYTES, UNREAD_MESSAGES, Inbox, Placement, Received, weigh
from launcher.transports.local import LocalTransport
from launcher.transports.log_mirror import LogMirror
from tests.harness.witness import wait_until
from worker_entry.protocol.costs import COSTS
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import (
    Broken,
    Empty,
    Exited,
    Halted,
    Listening,
    Log,
    Message,
    Noted,
    Prepared,
    Ready,
    Refused,
    Stacks,
    Started,
    Status,
)
from worker_entry.protocol.orders import VERSION, Hello, Stop
from worker_entry.protocol.profiles import Profiled
from worker_entry.protocol.values import Activity, Problem, TaskExit, TaskStatus

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
NODES = {"honest": [W0], "hostile": [W1]}
NOTES = COSTS[Noted].at_once or 0
READY = Ready(VERSION, 1, "x", "3.11.0", "/usr/bin/python3", 0.0, 2, [], None)


@dataclass
class FarNode:
    """A link with the test at its far end."""

    sent: list[Message] = field(default_factory=list)
    confirmed: int = 0
    clock_offset_s = 0.0
    last_heard = 0.0

    def send(self, message: Message, body: bytes = b"") -> None:
        self.sent.append(message)

    def confirm(self, frame: int) -> None:
        self.confirmed = frame

    def drop_if_silent(self, limit_s: float) -> None:
        """Does nothing: the test decides when the link breaks."""

    kept = None

    def abandon(self) -> None:
        """Does nothing: no agent is behind the link."""

    def close(self) -> int:
        return 0


@dataclass
class FarTransport:
    """Keeps the arguments of `connect`, so that a test can play the node."""

    shares_files = False
    deliver: Deliver = field(init=False)
    logs: FileSink = field(init=False)
    node: FarNode = field(init=False)
    resumption: Resumption | None = None

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> Link:
        self.deliver, self.logs, self.node, self.resumption = deliver, mirror, FarNode(), resumption
        return self.node


@dataclass
class Run:
    links: NodeLinks
    root: Path
    targets: dict[str, FarTransport]

    def say(self, node: str, message: Message) -> None:
        self.targets[node].deliver(node, message)

    def log(self, node: str, attempt: int, task: str, data: bytes) -> None:
        self.targets[node].logs.write(Log(attempt, task, 0, len(data)), data)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    targets = {node: FarTransport() for node in NODES}
    links = NodeLinks(targets, "run", RunDir(tmp_path), 60.0)
    links.begin(1, NODES)
    for node in NODES:
        links.connect(node, "/")
    yield Run(links, tmp_path, targets)
    links.close()


def of_task(task: str) -> list[Message]:
    """Messages of every type that names a task."""
    problem = Problem("start-failed", "no", task=task)
    return [
        Started(task, 1, 1.0),
        Listening(task, 1.0),
        Halted(task, 19, 1.0),
        Status(task, TaskStatus("trains", 1.0)),
        Stacks(task, "", Activity()),
        Exited(task, TaskExit(0), 1.0),
        Exited(str(W1), TaskExit(1), 1.0, evidence=problem),
        Prepared(1, {str(W1): 2000, task: 2001}),
        Refused([Problem("no-program", "x"), problem]),
        Broken(problem),
    ]


@pytest.mark.parametrize("message", of_task(str(W0)), ids=lambda message: type(message).__name__)
def test_a_node_cannot_report_a_task_of_another_node(run: Run, message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} for worker:0, which is not one of its tasks"):
        run.say("hostile", message)
    assert run.links.next(0.0) is None


@pytest.mark.parametrize("answer", [Stacks(str(W1), "", Activity()), Profiled()], ids=lambda it: type(it).__name__)
def test_answers_of_a_node_to_user_requests_are_not_limited(run: Run, answer: Message) -> None:
    for _ in range(100):
        run.say("hostile", answer)
        assert run.links.next(0.0) == ("hostile", answer)


@pytest.mark.parametrize("message", of_task(str(W1)), ids=lambda message: type(message).__name__)
def test_a_node_can_report_its_own_tasks(run: Run, message: Message) -> None:
    run.say("hostile", message)
    assert run.links.next(0.0) == ("hostile", message)


def test_a_node_cannot_write_the_log_of_another_node(run: Run) -> None:
    run.log("honest", 1, "worker:0", b"training")
    with pytest.raises(ProtocolError, match="Log for worker:0, which is not one of its tasks"):
        run.log("hostile", 1, "worker:0", b"forged!!")
    assert (run.root / "attempt-1" / "worker-0.log").read_bytes() == b"training"


def test_messages_for_a_future_attempt_are_rejected_and_leave_no_folder(run: Run) -> None:
    for attempt in (2, 20_000):
        with pytest.raises(ProtocolError, match=f"Log for attempt {attempt}, which has not begun"):
            run.log("hostile", attempt, "worker:1", b"x")
        for message in (Prepared(attempt, {"worker:1": 2000}), Empty(attempt, 0, 0)):
            with pytest.raises(ProtocolError, match="which has not begun"):
                run.say("hostile", message)
    assert [*run.root.iterdir()] == []


def test_late_messages_are_ignored_after_their_task_has_moved(run: Run) -> None:
    run.say("hostile", Exited("worker:1", TaskExit(0), 1.0))
    run.say("hostile", Noted("no task is in it"))
    run.links.begin(2, {"honest": [W1], "hostile": [W0]})
    assert run.links.next(0.0) == ("hostile", Noted("no task is in it"))
    assert run.links.next(0.0) is None
    run.log("hostile", 1, "worker:1", b"late")
    assert [*run.root.iterdir()] == []
    with pytest.raises(ProtocolError):
        run.say("hostile", Exited("worker:1", TaskExit(0), 1.0))


def test_messages_from_an_older_link_to_a_node_are_ignored(run: Run) -> None:
    old = run.targets["hostile"].deliver
    run.say("hostile", READY)
    run.links.forget(["hostile"])
    run.links.connect("hostile", "/")
    old("hostile", READY)
    old("hostile", LinkClosed("it is gone"))
    assert run.links.next(0.0) is None
    assert run.links.ready == {}
    run.say("hostile", READY)
    assert run.links.next(0.0) == ("hostile", READY)
    assert run.links.ready == {"hostile": READY}


def test_thousands_of_late_messages_are_skipped_in_one_call(run: Run) -> None:
    for _ in range(UNREAD_MESSAGES):
        run.say("hostile", Prepared(1, {"worker:1": 1}))
        run.say("honest", Prepared(1, {"worker:0": 1}))
    run.links.begin(2, {})
    run.links.put(Interrupted(2))
    assert run.links.next(0.0) == Interrupted(2)


# --- confirmations ---


def test_a_frame_is_confirmed_when_the_next_one_is_requested(run: Run) -> None:
    node, deliver = run.targets["hostile"].node, run.targets["hostile"].deliver
    deliver("hostile", READY, 1)
    deliver("hostile", Listening("worker:1", 1.0), 2)
    deliver("hostile", LinkDropped("the cable"), 0)
    assert node.confirmed == 0
    assert run.links.next(0.0) == ("hostile", READY)
    assert (run.links.frame, node.confirmed) == (1, 0)
    assert run.links.next(0.0) == ("hostile", Listening("worker:1", 1.0))
    assert (run.links.frame, node.confirmed) == (2, 1)
    assert run.links.next(0.0) == ("hostile", LinkDropped("the cable"))
    assert (run.links.frame, node.confirmed) == (0, 2)
    assert run.links.next(0.0) is None
    assert (run.links.frame, node.confirmed) == (0, 2)


def test_dropped_messages_are_confirmed_but_not_before_earlier_messages(run: Run) -> None:
    node, deliver = run.targets["hostile"].node, run.targets["hostile"].deliver
    for frame in range(1, 3 * NOTES + 1):
        deliver("hostile", Noted("look at me"), frame)
    assert node.confirmed == 0
    for _ in range(NOTES):
        assert run.links.next(0.0) is not None
    assert node.confirmed == NOTES - 1
    assert run.links.next(0.0) == ("hostile", Noted("it sends too much; the rest is left out"))
    assert node.confirmed == 3 * NOTES
    assert run.links.next(0.0) is None
    deliver("hostile", Noted("look at me"), 3 * NOTES + 1)
    assert node.confirmed == 3 * NOTES + 1
    deliver("hostile", Listening("worker:1", 1.0), 3 * NOTES + 2)
    run.links.begin(2, {})
    deliver("hostile", Empty(1, 0, 0), 3 * NOTES + 3)
    assert run.links.next(0.0) == ("hostile", Empty(1, 0, 0))
    assert node.confirmed == 3 * NOTES + 2  # the Listening was late
    run.links.close()
    deliver("hostile", Noted("the last one"), 3 * NOTES + 4)
    assert node.confirmed == 3 * NOTES + 4


def test_a_resumed_agent_is_connected_without_a_hello(run: Run) -> None:
    held = Resumption(
        reattach_folder="/tmp/x", run_id="run", generation=1, handled=1, attempt=1, offsets={}, ready=READY
    )
    run.links.resume("hostile", held)
    assert run.targets["hostile"].resumption == held
    assert run.links.ready == {"hostile": READY}
    assert run.targets["hostile"].node.sent == []
    assert run.targets["honest"].resumption is None
    assert [type(message) for message in run.targets["honest"].node.sent] == [Hello]
    run.links.send("hostile", Stop(1.0))
    assert run.targets["hostile"].node.sent == [Stop(1.0)]


def test_an_impossible_resumption_is_reported_as_a_closed_link(tmp_path: Path) -> None:
    links = NodeLinks({"here": LocalTransport(tmp_path / "errors")}, "run", RunDir(tmp_path), 60.0)
    links.begin(1, {"here": [W0]})
    links.resume(
        "here", Resumption(reattach_folder="/tmp/x", run_id="run", generation=1, handled=1, attempt=1, offsets={})
    )
    reason = "an agent on its controller's own machine ends with its controller"
    assert links.next(0.0) == ("here", LinkClosed(reason))
    assert links.close() == {}


# --- limits of unread messages ---


class Flood:
    """A node that sends as fast as it can, from a thread like that of a link."""

    def __init__(self, tmp_path: Path, message: Message) -> None:
        self.arrived: list[Received] = []
        placement = Placement.of(1, NODES)
        self.inbox = Inbox("hostile", lambda: placement, LogMirror(lambda *_: tmp_path), self.arrived.append)
        self.stop = threading.Event()
        self._message = message
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            self.inbox.deliver("hostile", self._message)

    def end(self) -> None:
        self.stop.set()
        self.inbox.close()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("size", [1, 8000, 1 << 20])
def test_a_flood_of_messages_blocks_at_the_limit_until_messages_are_read(tmp_path: Path, size: int) -> None:
    message = Prepared(1, {}, {"worker:1": "x" * size})
    most = min(UNREAD_MESSAGES, UNREAD_BYTES // weigh(message))
    flood = Flood(tmp_path, message)
    try:
        wait_until(lambda: len(flood.arrived) == most, "the flood waits")
        for arrived in flood.arrived[:most]:
            flood.inbox.release(arrived)
        wait_until(lambda: len(flood.arrived) == 2 * most, "the flood continues")
        assert sum(arrived.weight for arrived in flood.arrived[most:]) <= UNREAD_BYTES
    finally:
        flood.end()


def test_a_single_message_above_the_size_limit_is_delivered(tmp_path: Path) -> None:
    flood = Flood(tmp_path, replace(READY, gpus=["x" * 256] * 30_000))
    try:
        wait_until(lambda: len(flood.arrived) == 1, "the message arrives")
    finally:
        flood.end()


def test_the_end_of_a_link_is_reported_despite_a_full_inbox(tmp_path: Path) -> None:
    flood = Flood(tmp_path, Prepared(1, {"worker:1": 1}))
    try:
        wait_until(lambda: len(flood.arrived) == UNREAD_MESSAGES, "the flood waits")
        flood.inbox.deliver("hostile", LinkClosed("gone"))
        assert len(flood.arrived) == UNREAD_MESSAGES + 1
    finally:
        flood.end()


def test_the_message_limit_of_a_node_grows_with_its_tasks(run: Run) -> None:
    run.links.begin(2, {"honest": [W0], "hostile": [TaskId("worker", number) for number in range(1, 9)]})
    stacks = [Stacks(f"worker:{number}", "x", Activity()) for number in range(1, 9) for _ in range(3)]
    for each in stacks:
        run.say("hostile", each)
    assert [run.links.next(0.0) for _ in stacks] == [("hostile", each) for each in stacks]


def test_notes_from_a_node_to_the_user_are_limited_per_attempt(run: Run) -> None:
    for _ in range(3 * NOTES):
        run.say("hostile", Noted("look at me"))
        run.say("honest", Noted("a hole"))
    shown = [run.links.next(0.0) for _ in range(2 * NOTES + 2)]
    assert shown.count(("hostile", Noted("look at me"))) == NOTES
    assert shown.count(("hostile", Noted("it sends too much; the rest is left out"))) == 1
    assert run.links.next(0.0) is None
    run.links.begin(2, NODES)
    run.say("hostile", Noted("look at me"))
    assert run.links.next(0.0) == ("hostile", Noted("look at me"))
