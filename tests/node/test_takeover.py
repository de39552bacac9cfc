"""A controller takes over the agents of a killed one: nothing is lost or doubled, and the tasks continue."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.transports import resumable_link
from launcher.transports.base import (
    LinkClosed,
    LinkDropped,
    LinkError,
    LinkNews,
    LinkResumed,
    LinkTakenOver,
    Resumption,
)
from launcher.transports.local import LocalTransport
from launcher.transports.log_mirror import LogMirror
from launcher.transports.resumable_link import ResumableLink
from tests.harness.hosts import loopback
from tests.harness.hosts.sshd import Hosts, running_hosts, skip_without_openssh
from tests.harness.places import ROOT
from tests.harness.polling import eventually
from tests.harness.processes.agent_streams import ENTRY, FarEnd, Pipes, beat_often
from tests.harness.processes.takeover_driver import RUN_ID, Case, messages_in, read_journal
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import MARK, await_none_left, make_mark, wait_until
from worker_entry.protocol.collection import FilesFound, FindFiles
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import (
    Attached,
    Broken,
    Cleaned,
    Empty,
    Exited,
    Halted,
    Listening,
    Log,
    Message,
    Noted,
    Prepared,
    Ready,
    Started,
    Status,
)
from worker_entry.protocol.orders import (
    AGENT_GONE,
    TAKEN_OVER,
    VERSION,
    Attach,
    Beat,
    Clean,
    Goodbye,
    Hello,
    Prepare,
    ShowStacks,
    Start,
    Stop,
)
from worker_entry.protocol.resend_buffer import ResendBuffer
from worker_entry.protocol.values import Problem, Program, TaskExit, TaskRequest, TaskStart, TaskStatus
from worker_entry.system import kernel

COVERS = (
    "launcher/rundir",
    "launcher/sources",
    "launcher/exporters",
    "launcher/controller",
    "worker_entry/agent",
    "launcher/transports/resumable_link.py",
    "launcher/transports/reconnect.py",
)

linux = pytest.mark.skipif(not kernel.LINUX, reason="looks for what is left in /proc")


# --- the counts of both sides ---


@dataclass
class Side:
    """The counts of a controller; `way` holds the numbers of frames that have not arrived."""

    outbox: ResendBuffer
    way: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    handled: int = 0


@given(st.lists(st.sampled_from(["report", "deliver", "handle", "beat", "order", "obey", "drop", "kill"]), max_size=80))
def test_every_frame_is_handled_once_and_in_order_despite_kills_and_drops(course: list[str]) -> None:
    """The agent numbers its reports; a killed controller leaves only its journal."""
    agent, controller, journal = ResendBuffer(), Side(ResendBuffer()), list[int]()
    orders_given, orders_obeyed = 0, list[int]()
    for step in [*course, "drop", "deliver", "handle"]:
        if step == "report":
            agent.add(b"%d" % (agent.last + 1))
            controller.way.append(agent.last)
        elif step == "deliver":
            controller.received += controller.way
            controller.outbox.received += len(controller.way)
            controller.way = []
        elif step == "handle":
            journal += controller.received
            controller.handled += len(controller.received)
            controller.received = []
        elif step == "beat":
            agent.confirm(controller.handled)
        elif step == "order":
            orders_given += 1
            controller.outbox.add(b"%d" % orders_given)
        elif step == "obey":
            new = controller.outbox.after(agent.received)
            orders_obeyed += map(int, new)
            agent.received += len(new)
            controller.outbox.confirm(agent.received)
        elif step == "drop":
            controller.way = [*map(int, agent.after(controller.outbox.received))]
        else:
            count = max(len(journal), agent.confirmed)
            controller = Side(ResendBuffer(), handled=count)
            controller.outbox.follow(agent.received, count)
            controller.way = [*map(int, agent.after(count))]
    assert journal == [*range(1, agent.last + 1)]
    assert orders_obeyed == sorted(set(orders_obeyed))


def test_a_new_controller_renumbers_its_pending_orders_after_those_of_its_predecessor() -> None:
    outbox = ResendBuffer()
    outbox.add(b"first")
    outbox.follow(sent=7, received=3)
    outbox.add(b"second")
    assert (outbox.last, outbox.received, outbox.confirmed) == (9, 3, 7)
    assert outbox.after(8) == [b"second"]


# --- the controller's side, with a scripted far end ---

HELD = Resumption(
    reattach_folder="/tmp/agent-x", run_id="run", generation=2, handled=4, attempt=1, offsets={"worker:0": 5}
)


class Taking:
    """A controller that takes over; `ends` are its connections, one after the other."""

    def __init__(self, root: Path, *ends: FarEnd, lease_s: float = 20.0) -> None:
        self.delivered: list[tuple[Message | LinkNews, int]] = []
        targets = iter(ends)
        self.mirror = LogMirror(lambda attempt, task: root / f"{attempt}-{task.replace(':', '-')}")

        def start() -> FarEnd:
            raise AssertionError("an agent was started")

        self.link = ResumableLink(
            "gpu-a",
            start,
            lambda _, message, frame=0: self.delivered.append((message, frame)),
            self.mirror,
            lease_s=lease_s,
            reopen=lambda _: next(targets),
            resumption=HELD,
        )

    def expect(self, kind: type) -> Any:
        def look() -> Any:
            found = [message for message, _ in self.delivered if isinstance(message, kind)]
            assert found, self.delivered
            return found[-1]

        return eventually(look)


def beats_at(end: FarEnd) -> list[Beat]:
    return [message for message, _ in Decoder().feed(bytes(end.to_agent)) if isinstance(message, Beat)]


def test_a_takeover_continues_the_frame_counts_of_both_directions(tmp_path: Path) -> None:
    end = FarEnd()
    taking = Taking(tmp_path, end)
    taking.link.send(Stop(1.0))  # waits until the agent has answered
    end.from_agent.put(MARKER)
    assert end.attach() == Attach(
        VERSION,
        "/tmp/agent-x",
        received=4,
        attempt=1,
        offsets={"worker:0": 5},
        generation=2,
        takeover=True,
        run_id="run",
    )
    end.say(Attached(received=9, first=7), Listening("worker:0", 1.0), Listening("worker:1", 1.0))
    wait_until(lambda: len(taking.delivered) == 3, "all is delivered")
    assert taking.delivered == [
        (LinkTakenOver(9), 0),
        (Listening("worker:0", 1.0), 7),
        (Listening("worker:1", 1.0), 8),
    ]
    wait_until(lambda: end.heard()[1:] == [Stop(1.0)], "what waited is sent")
    end.say(Beat(1.0, 10))  # 11 frames would be one more than were sent
    end.say(Beat(1.0, 11))
    assert "11 frames, but only 10 were sent" in taking.expect(LinkClosed).reason


def test_a_controller_confirms_handled_frames_and_does_not_request_read_frames_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_often(monkeypatch)
    first, second = FarEnd(), FarEnd()
    taking = Taking(tmp_path, first, second)
    first.from_agent.put(MARKER + encode(Attached(0, 5)) + encode(Noted("5")) + encode(Noted("6")))
    wait_until(lambda: len(taking.delivered) == 3, "both are read")
    wait_until(lambda: len(beats_at(first)) >= 2, "beats")
    assert {beat.received for beat in beats_at(first)} == {4}
    taking.link.confirm(5)
    wait_until(lambda: beats_at(first)[-1].received == 5, "the next beats confirm it")
    first.from_agent.put(None)
    attach = second.attach()
    assert (attach.received, attach.takeover, attach.generation) == (6, False, 2)
    second.from_agent.put(MARKER + encode(Attached(0, 7)) + encode(Noted("7")))
    wait_until(lambda: taking.delivered[-1] == (Noted("7"), 7), "the link continues")
    wait_until(lambda: len(beats_at(second)) >= 1, "beats")
    assert beats_at(second)[-1].received == 5
    taking.link.abandon()


def test_the_lease_is_renewed_immediately_after_a_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats are seconds apart, and the lease may be about to expire."""
    monkeypatch.setattr(resumable_link, "BEAT_S", 1000.0)
    end = FarEnd()
    taking = Taking(tmp_path, end, lease_s=5000.0)
    end.from_agent.put(MARKER + encode(Attached(0, 5)))
    wait_until(lambda: len(beats_at(end)) == 1, "a beat")
    end.say(Beat(1.0, 0, echo=1.0, stamp=77.0))
    wait_until(lambda: beats_at(end)[-1].stamp == 77.0, "the stamp is returned")
    taking.link.abandon()


def test_a_takeover_is_requested_again_if_its_answer_is_lost(tmp_path: Path) -> None:
    first, second = FarEnd(), FarEnd()
    taking = Taking(tmp_path, first, second)
    first.from_agent.put(MARKER)
    attach = first.attach()
    first.from_agent.put(None)
    assert second.attach() == attach
    second.from_agent.put(MARKER + encode(Attached(0, 5)))
    taking.expect(LinkTakenOver)
    assert not [message for message, _ in taking.delivered if isinstance(message, (LinkDropped, LinkResumed))]
    taking.link.abandon()


@pytest.mark.parametrize(
    ("answer", "reason", "ended", "taken_over"),
    [
        (Broken(Problem(AGENT_GONE, "its agent has ended")), "its agent has ended", True, False),
        (Broken(Problem(TAKEN_OVER, "another has it")), "another has it", False, True),
        (Broken(Problem("protocol-error", "the agent was sent x")), "the agent was sent x", False, False),
        (Attached(0, 4), "the agent sent Attached with frame 4 after 4", False, False),
        (Listening("worker:0", 1.0), "the agent sent Listening before Attached", False, False),
        (Log(1, "worker:0", 0, 0), "the agent sent Log before Attached", False, False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, bool)) else "",
)
def test_a_refused_takeover_ends_the_link_with_the_reason(
    tmp_path: Path, answer: Message, reason: str, ended: bool, taken_over: bool
) -> None:
    end = FarEnd()
    taking = Taking(tmp_path, end)
    end.from_agent.put(MARKER + encode(answer))
    closed = taking.expect(LinkClosed)
    assert closed.reason.startswith(reason)
    assert (closed.taken_over, taking.link.ended, taking.link.taken_over) == (taken_over, ended, taken_over)
    assert [type(message) for message, _ in taking.delivered] == [LinkClosed]
    wait_until(lambda: end.is_cut, "the connection is closed")


def test_a_takeover_fails_if_the_agent_is_unreachable_for_its_lease(tmp_path: Path) -> None:
    taking = Taking(tmp_path, *(FarEnd() for _ in range(50)), lease_s=1.0)
    assert "its controller is gone, and not reconnected within 1 s" in taking.expect(LinkClosed).reason


def test_a_mirrored_log_continues_where_the_previous_controller_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"what was")
    mirror = LogMirror(lambda *_: log)
    assert mirror.write(Log(1, "worker:0", 5, 10), b"was and is")
    mirror.close()
    assert log.read_bytes() == b"what was and is"


def test_a_local_agent_cannot_be_taken_over(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="ends with its controller"):
        LocalTransport(tmp_path / "errors").connect("here", lambda *_: None, LogMirror(lambda *_: tmp_path), 5.0, HELD)


# --- a real agent, and controllers of this process ---


@dataclass
class Held:
    """An agent whose controller is gone; `take` creates another one."""

    root: Path
    mark: Mapping[str, str]
    links: list[ResumableLink] = field(default_factory=list)
    delivered: list[list[tuple[Message | LinkNews, int]]] = field(default_factory=list)
    used: list[Pipes] = field(default_factory=list)

    def take(self, resumption: Resumption | None = None, lease_s: float = 30.0) -> ResumableLink:
        delivered: list[tuple[Message | LinkNews, int]] = []
        self.delivered.append(delivered)
        self.links.append(
            ResumableLink(
                "gpu-a",
                lambda: self._open("node"),
                lambda _, message, frame=0: delivered.append((message, frame)),
                LogMirror(lambda *_: self.root / "mirror"),
                lease_s=lease_s,
                reopen=lambda _: self._open("attach"),
                resumption=resumption,
            )
        )
        return self.links[-1]

    def _open(self, verb: str) -> Pipes:
        self.used.append(Pipes(verb, self.mark))
        return self.used[-1]

    def begin(self, lease_s: float = 30.0) -> ResumableLink:
        link = self.take(lease_s=lease_s)
        link.send(Hello(VERSION, RUN_ID, str(self.root / "node"), str(self.root), lease_s, stream_logs=True))
        self.expect(Ready)
        return link

    def expect(self, kind: type, of: int = -1) -> Any:
        def look() -> Any:
            found = [message for message, _ in self.delivered[of] if isinstance(message, kind)]
            assert found, [message for message, _ in self.delivered[of]][-5:]
            return found[-1]

        return eventually(look)

    def resumption(self, generation: int, handled: int) -> Resumption:
        folder = self.links[0].reattach_folder
        assert folder is not None
        ready = next(message for message, _ in self.delivered[0] if isinstance(message, Ready))
        return Resumption(
            reattach_folder=folder,
            run_id=RUN_ID,
            generation=generation,
            handled=handled,
            attempt=0,
            offsets={},
            ready=ready,
        )

    def kill(self) -> None:
        """Ends the latest controller as SIGKILL does: without a message."""
        self.links[-1].abandon()

    def frames(self, of: int = -1) -> list[tuple[int, Message | LinkNews]]:
        return [(frame, message) for message, frame in self.delivered[of] if frame]

    def kinds(self) -> list[type]:
        """The kinds of the last controller's frames."""
        return [type(message) for _, message in self.frames()]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = Held(tmp_path, make_mark())
    yield held
    for link in held.links:
        link.send(Goodbye())
        link.finish()
        link.join(0.0)
    for link in held.links[:-1]:
        link.abandon()
    assert held.links[-1].join(20)
    held.links[-1].abandon()
    await_none_left({**held.mark})


PORTS = loopback.ports()


def prepare(number: int, program: str = "sh") -> Prepare:
    return Prepare(number, [TaskRequest("worker:0", Program("command", program, []))], PORTS[0], PORTS[-1])


@linux
def test_a_large_backlog_arrives_once_and_in_order_after_a_takeover(held: Held) -> None:
    """The killed controller has read 500 frames and handled some of them; the rest exceeds a socket's buffer."""
    first = held.begin()
    for number in range(1, 501):
        first.send(prepare(number, "/nowhere/" + 3000 * "x"))  # the agent refuses this program and repeats its name
    wait_until(lambda: len(held.frames()) == 501, "all are read")
    first.confirm(120)
    held.kill()
    second = held.take(held.resumption(1, handled=200))
    wait_until(lambda: len(held.frames()) >= 301, "the rest arrives")
    assert held.frames() == held.frames(0)[200:]
    assert sum(len(encode(cast(Message, message))) for _, message in held.frames()) > 1 << 19
    assert held.expect(LinkTakenOver) == LinkTakenOver(501)
    second.send(prepare(501))
    wait_until(lambda: len(held.frames()) == 302, "it obeys")
    assert held.frames()[-1][0] == 502


@linux
def test_confirmed_frames_are_not_resent_after_a_takeover(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    beat_often(monkeypatch)
    first = held.begin()
    for number in range(1, 6):
        first.send(prepare(number))
    wait_until(lambda: len(held.frames()) == 6, "all are read")
    first.confirm(4)

    def is_confirmed() -> bool:
        held.kill()
        held.take(held.resumption(len(held.links), handled=1))
        held.expect(LinkTakenOver)
        wait_until(lambda: len(held.frames()) >= 1, "the rest")
        held.links[-1].confirm(4)
        return held.frames()[0][0] == 5

    wait_until(is_confirmed, "what was handled is not sent again")
    wait_until(lambda: [frame for frame, _ in held.frames()] == [5, 6], "what was not is")


@linux
def test_unhandled_frames_of_earlier_connections_are_resent_after_a_takeover(held: Held) -> None:
    first = held.begin()
    for number in range(1, 6):
        first.send(prepare(number))
    wait_until(lambda: len(held.frames()) == 6, "all are read")
    held.used[0].cut()
    held.expect(LinkResumed)
    first.send(prepare(6))
    wait_until(lambda: len(held.frames()) == 7, "the link continues")
    held.kill()
    held.take(held.resumption(1, handled=2))
    wait_until(lambda: len(held.frames()) == 5, "the rest arrives")
    assert held.frames() == held.frames(0)[2:]


@linux
def test_the_agent_repeats_the_current_task_states_to_a_new_controller(held: Held) -> None:
    status = held.root / "node" / "attempt-1" / "worker-0.status.json"
    script = f'echo \'{{"phase": "trains", "since": 1.0}}\' > {status}.new; mv {status}.new {status}; exec sleep 600'
    program = Program("command", "sh", ["-c", script])
    first = held.begin()
    first.send(Prepare(1, [TaskRequest("worker:0", program)], PORTS[0], PORTS[-1]))
    first.send(Start(1, [TaskStart("worker:0", program)]))
    told = held.expect(Status)
    assert told == Status("worker:0", TaskStatus("trains", 1.0))
    last = held.frames()[-1][0]
    held.kill()
    second = held.take(held.resumption(1, handled=last))
    assert held.expect(Status) == told
    assert held.kinds() == [Started, Status]
    assert held.frames()[-1] == (last + 2, told)
    pid = held.expect(Started).pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: held.kinds()[-1] is Halted, "it is stopped")
    held.kill()
    third = held.take(held.resumption(2, handled=held.frames()[-1][0]))
    wait_until(lambda: held.kinds() == [Started, Status, Halted], "all is said again")
    os.kill(pid, signal.SIGKILL)
    end = held.expect(Exited)
    held.kill()
    second = held.take(held.resumption(3, handled=held.frames()[-1][0]))
    assert held.expect(Exited) == end
    assert third is not second
    second.send(Stop(0.0))
    held.expect(Empty)


def end_attempt(held: Held, command: str) -> int:
    """Runs an attempt with this shell command to its end; returns the number of the last frame."""
    program = Program("command", "sh", ["-c", command])
    link = held.begin()
    link.send(Prepare(1, [TaskRequest("worker:0", program)], PORTS[0], PORTS[-1]))
    link.send(Start(1, [TaskStart("worker:0", program)]))
    held.expect(Exited)
    link.send(Stop(0.0))
    held.expect(Empty)
    return held.frames()[-1][0]


@linux
def test_an_unhandled_end_of_an_attempt_is_resent_after_its_complete_log(held: Held) -> None:
    empty = end_attempt(held, "head -c 3000000 /dev/urandom")
    held.kill()
    (held.root / "mirror").write_bytes(b"")  # as if the old controller had written nothing
    held.take(held.resumption(1, handled=empty - 1))
    held.expect(Empty)
    assert held.kinds() == [Started, Exited, Empty]
    written = held.root / "node" / "attempt-1" / "worker-0.log"
    assert_same_bytes((held.root / "mirror").read_bytes(), written.read_bytes())


@linux
@pytest.mark.parametrize("has_handled", [True, False])
def test_frames_after_the_end_of_an_attempt_survive_a_takeover(held: Held, has_handled: bool) -> None:
    """Only the end of the attempt is sent again after the logs."""
    empty = end_attempt(held, "echo 1")
    held.links[-1].send(FindFiles(7, "nothing", [], 0.0))
    answer = held.expect(FilesFound)
    held.kill()
    held.take(held.resumption(1, handled=empty if has_handled else empty - 1))
    assert held.expect(FilesFound) == answer
    if not has_handled:
        held.expect(Empty)
    kinds = held.kinds()
    assert (kinds.count(FilesFound), kinds.count(Empty)) == (1, 0 if has_handled else 1)
    numbers = [number for number, _ in held.frames()]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    assert numbers[0] == empty + has_handled


@linux
def test_a_replaced_controller_cannot_clean_the_node(held: Held) -> None:
    held.begin()
    second = held.take(held.resumption(1, handled=1))
    held.expect(LinkTakenOver)

    def clean(generation: int | None) -> Message:
        order = Clean(VERSION, [], second.reattach_folder, generation)
        cleaning = subprocess.run(
            [sys.executable, ENTRY, "clean"], input=encode(order), stdout=subprocess.PIPE, check=False
        )
        [(answer, _)] = Decoder().feed(cleaning.stdout.removeprefix(MARKER))
        return answer

    assert clean(0) == Broken(Problem(TAKEN_OVER, "another controller has taken over the run"))
    second.send(prepare(1))
    held.expect(Prepared)
    assert clean(1) == Cleaned(0, [])
    held.expect(LinkClosed)


def spoilt(folder: str) -> dict[str, bytes]:
    attach = Attach(VERSION, folder, 1, 0, {}, generation=1, takeover=True, run_id=RUN_ID)
    return {
        "nothing": b"\n",
        "garbage": os.urandom(3000).replace(b"\n", b"") + b"\n",
        "zeros": bytes(100) + b"\n",
        "half a frame": encode(attach)[:40] + b"\n",
        "two frames": 2 * encode(attach),
        "another order": encode(ShowStacks()),
        "an unknown field": encode(attach).replace(b'"generation"', b'"generations"'),
        "another version": encode(replace(attach, version=VERSION + 1)),
        "a negative generation": encode(attach).replace(b'"generation":1', b'"generation":-1'),
        "a generation of 100 digits": encode(attach).replace(b'"generation":1', b'"generation":1' + b"0" * 99),
        "a takeover by the first": encode(replace(attach, generation=0)),
        "a later generation without a takeover": encode(replace(attach, takeover=False)),
        "another run": encode(replace(attach, run_id="another")),
        "frames that were never sent": encode(replace(attach, received=1 << 50)),
    }


@linux
def test_an_invalid_takeover_is_refused_with_a_reason_and_changes_nothing(held: Held) -> None:
    first = held.begin()
    folder = first.reattach_folder
    assert folder is not None
    for name, words in spoilt(folder).items():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.connect(os.path.join(folder, "socket"))
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(call, [words], [theirs.fileno(), theirs.fileno()])
                theirs.close()
                ours.settimeout(20)
                answer = b""
                while data := ours.recv(1 << 16):
                    answer += data
        [(refusal, _)] = Decoder().feed(answer.removeprefix(MARKER))
        assert isinstance(refusal, Broken), name
        assert refusal.problem.reference == "protocol-error", name
        assert refusal.problem.message.startswith("the agent was sent "), name
    first.send(prepare(1))
    held.expect(Prepared)
    assert [type(message) for message, _ in held.delivered[0]] == [Ready, Prepared]


@linux
def test_a_connection_that_ends_with_an_incomplete_attach_changes_nothing(held: Held) -> None:
    first = held.begin()
    folder = first.reattach_folder
    assert folder is not None
    for words in (b"x", encode(held_attach(folder))[:-5]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.connect(os.path.join(folder, "socket"))
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(call, [words], [theirs.fileno(), theirs.fileno()])
    first.send(prepare(1))
    held.expect(Prepared)


def held_attach(folder: str) -> Attach:
    return Attach(VERSION, folder, 1, 0, {}, generation=1, takeover=True, run_id=RUN_ID)


# --- controllers as processes that are killed ---

SCRIPT = "for i in $(seq 300); do echo line $i; sleep 0.005; done; head -c 1000000 /dev/zero; exit 7"


@dataclass
class Relay:
    """A run whose controllers follow each other."""

    folder: Path
    case: Case
    env: Mapping[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "case.json").write_text(json.dumps(asdict(self.case)))

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "tests.harness.processes.takeover_driver",
            str(self.folder),
            str(len(self.started)),
        ]
        self.started.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **self.env}))
        return self.started[-1]

    @property
    def journal(self) -> list[dict[str, Any]]:
        return read_journal(self.folder)

    def valid(self) -> list[dict[str, Any]]:
        """The journal without entries of replaced controllers: on resume, such a controller reads what had arrived."""
        journal = self.journal  # read once: it grows meanwhile
        generations = [entry["generation"] for entry in journal]
        return [entry for at, entry in enumerate(journal) if entry["generation"] == max(generations[: at + 1])]

    def kinds(self) -> list[type]:
        return [type(message) for message in messages_in(self.valid())]

    def wait_for_entries(self, count: int) -> None:
        wait_until(lambda: len(self.journal) >= count or self.started[-1].poll() is not None, f"{count} are handled")

    def wait_for_takeover(self) -> None:
        """Waits until the last controller has the agent."""
        generation = len(self.started) - 1

        def has_it() -> bool:
            return any("taken_over" in entry and entry["generation"] == generation for entry in self.journal)

        wait_until(has_it, "it has taken over")

    def log_here(self, worker: int) -> bytes:
        path = self.folder / "run" / "attempt-1" / f"worker-{worker}.log"
        return path.read_bytes() if path.exists() else b""

    def log_there(self, worker: int) -> bytes:
        nodes = Path(self.env["HOME"]) / ".local" / "state" / "distlaunch" / "nodes"
        return (nodes / RUN_ID / "attempt-1" / f"worker-{worker}.log").read_bytes()

    def finish(self) -> None:
        """Waits for the last controller, and checks what all controllers have seen."""
        assert self.started[-1].wait(60) == 0
        assert self.valid()[-1] == {"ended": 0, "generation": len(self.started) - 1}
        frames = [entry["frame"] for entry in self.valid() if "frame" in entry]
        assert frames == sorted(set(frames))
        assert Counter(self.kinds()) == {Ready: 1, Prepared: 1, Started: 2, Exited: 2, Empty: 1}
        messages = messages_in(self.valid())
        assert {m.exit for m in messages if isinstance(m, Exited)} == {TaskExit(code=7)}
        assert self.kinds()[-1] is Empty
        lines = b"".join(b"line %d\n" % number for number in range(1, 301))
        for worker in range(2):
            assert self.log_here(worker) == self.log_there(worker) == lines + bytes(1_000_000)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    (tmp_path / "home").mkdir()
    env = {**make_mark(), "HOME": str(tmp_path / "home")}
    yield from _relaying(Relay(tmp_path, Case(["sh", "-c", SCRIPT], (PORTS[0], PORTS[-1])), env))


def _relaying(relay: Relay) -> Iterator[Relay]:
    yield relay
    for process in relay.started:
        if process.poll() is None:
            process.kill()
        process.wait()
    mark = {MARK: relay.env[MARK]}
    await_none_left(mark, relay.case.lease_s + 20)


@linux
@pytest.mark.parametrize("seed", range(2))
def test_tasks_continue_when_their_controllers_are_killed_at_random_moments(relay: Relay, seed: int) -> None:
    chance = random.Random(seed)
    entries = 1
    for _ in range(2):
        relay.start()
        relay.wait_for_entries(entries)
        time.sleep(chance.uniform(0.0, 0.8))  # at any moment of the run, on purpose
        if relay.started[-1].poll() is not None:
            break
        relay.started[-1].kill()
        relay.started[-1].wait()
        entries = len(relay.journal) + chance.randint(0, 2)
    if relay.started[-1].poll() != 0:
        relay.start()
    relay.finish()


@pytest.mark.slow
@linux
def test_a_suspended_controller_exits_on_resume_if_another_has_its_agent(relay: Relay) -> None:
    first = relay.start()
    wait_until(lambda: relay.kinds().count(Started) == 2, "both tasks have started")
    first.send_signal(signal.SIGSTOP)
    second = relay.start()
    relay.wait_for_takeover()
    second.send_signal(signal.SIGSTOP)  # so that nothing ends before the first one has tried
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 0
    [closed] = [entry for entry in relay.journal if "closed" in entry]
    assert closed["replaced"], closed
    assert closed["closed"].startswith("another controller has taken over the run")
    assert (closed["generation"], closed["left"]) == (0, None)
    second.send_signal(signal.SIGCONT)
    relay.finish()


@linux
def test_a_takeover_reports_an_agent_that_ended_with_its_lease(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    mark = make_mark()
    case = Case(["sleep", "600"], (PORTS[0], PORTS[-1]), lease_s=4.0)  # 1 s expires on a busy machine
    relay = Relay(tmp_path, case, {**mark, "HOME": str(tmp_path / "home")})
    relay.start()
    wait_until(lambda: relay.kinds().count(Started) == 2, "both tasks have started")
    relay.started[-1].kill()
    relay.started[-1].wait()
    await_none_left(mark)
    relay.start().wait(60)
    assert relay.journal[-1] == {
        "closed": "its agent has ended (its controller is gone)",
        "replaced": False,
        "generation": 1,
        "left": 0,
    }


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    with running_hosts(tmp_path_factory.mktemp("ssh")) as started:
        started.trust()
        yield started


@pytest.mark.ssh
def test_a_killed_and_a_suspended_controller_are_replaced_over_ssh(hosts: Hosts, tmp_path: Path) -> None:
    mark = make_mark()
    # The tasks run until the controllers have replaced each other.
    go = tmp_path / "go"
    script = SCRIPT.replace("sleep 0.005;", f"[ $i != 100 ] || until [ -e {go} ]; do sleep 0.05; done; sleep 0.005;")
    case = Case(["env", f"{MARK}={mark[MARK]}", "sh", "-c", script], (PORTS[0], PORTS[-1]), host="gpu-a")
    relay = Relay(tmp_path, case, {**hosts.env, **mark})
    try:
        relay.start()
        wait_until(lambda: b"line 20\n" in relay.log_here(0), "it trains")
        relay.started[-1].kill()
        relay.started[-1].wait()
        stopped = relay.start()
        relay.wait_for_takeover()
        stopped.send_signal(signal.SIGSTOP)
        last = relay.start()
        relay.wait_for_takeover()
        last.send_signal(signal.SIGSTOP)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == 0
        go.touch()
        last.send_signal(signal.SIGCONT)
        relay.env = {**relay.env, "HOME": str(hosts.home)}
        relay.finish()
    finally:
        for process in relay.started:
            process.kill()
            process.wait()
    [closed] = [entry for entry in relay.journal if "closed" in entry]
    assert closed["replaced"], closed
    await_none_left(mark)
