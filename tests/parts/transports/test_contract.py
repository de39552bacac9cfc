"""What every transport promises, and what happens with broken agents or programs that are not agents."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from launcher.rundir.directory import RunDir
from launcher.rundir.logs import LogFile
from launcher.tasks import TaskId, parse_task_id
from launcher.transports import local
from launcher.transports.base import Link, LinkClosed, LinkNews, Transport
from launcher.transports.local import LocalTransport
from launcher.transports.log_mirror import OPEN_LOGS, LogMirror
from tests.harness.apart import linux
from tests.harness.hosts import loopback
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import MARK, assert_none_left, make_mark, marked, open_descriptors, wait_until
from worker_entry.protocol.field_limits import BODY_LIMIT
from worker_entry.protocol.framing import MARKER, ProtocolError, encode
from worker_entry.protocol.log_index import parse_index
from worker_entry.protocol.messages import Empty, Exited, Listening, Log, Message, Prepared, Ready, Started
from worker_entry.protocol.orders import VERSION, Beat, Goodbye, Hello, Prepare, Start, Stop
from worker_entry.protocol.values import Program, TaskExit, TaskRequest, TaskStart
from worker_entry.system import clock

COVERS = ("launcher/transports", "worker_entry/agent", "worker_entry/protocol")

FAMILY = str(PROGRAMS / "tree_family.py")
PORTS = (loopback.ports()[0], loopback.ports()[-1])

M = TypeVar("M")


@dataclass
class Node:
    """A node as the supervisor sees it: a link, and what has come over it."""

    name: str
    transport: Transport
    mirror_root: Path
    mirror: LogMirror = field(init=False)
    link: Link = field(init=False)
    received: list[Message | LinkNews] = field(default_factory=list)
    closed: int | None = None

    def __post_init__(self) -> None:
        files = RunDir(self.mirror_root)
        self.mirror = LogMirror(lambda attempt, task: files.log(attempt, parse_task_id(task)))

    def connect(self) -> None:
        self.link = self.transport.connect(self.name, self._deliver, self.mirror, 60.0)

    def _deliver(self, node: str, message: Message | LinkNews, frame: int = 0) -> None:
        assert node == self.name
        self.received.append(message)  # from the link's own thread

    def expect(self, kind: type[M]) -> M:
        def has_come() -> M:
            found = [message for message in self.received if isinstance(message, kind)]
            assert found, f"no {kind.__name__} in {self.received}"
            return found[0]

        return eventually(has_come)

    def greet(self, directory: Path) -> Ready:
        self.link.send(Hello(VERSION, "run", str(directory), "/", 60.0, not self.transport.shares_files))
        return self.expect(Ready)

    def start(self, *argv: str, task: str = "worker:0") -> int:
        program = Program("command", argv[0], list(argv[1:]))
        self.link.send(Prepare(1, [TaskRequest(task, program)], *PORTS))
        self.expect(Prepared)
        self.link.send(Start(1, [TaskStart(task, program)]))
        return self.expect(Started).pid

    def close(self) -> int | None:
        left = self.link.close()
        self.mirror.close()
        return left


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """All that a test starts has this mark, and nothing of it may be left."""
    mark = make_mark()
    monkeypatch.setenv(MARK, mark[MARK])
    yield mark
    try:
        assert_none_left(mark, spare={os.getpid()})
    finally:
        for process in marked(mark):
            if process.pid != os.getpid():
                process.kill()


Connect = Callable[..., Node]


@pytest.fixture
def connect(mark: dict[str, str], tmp_path: Path) -> Iterator[Connect]:
    """Connects to this machine; what is not closed by the test is closed after it."""
    nodes: list[Node] = []

    def connect(*, name: str = "here", python: str = sys.executable, shares_files: bool = False) -> Node:
        transport = LocalTransport(tmp_path / f"{name}.stderr", python, shares_files=shares_files)
        node = Node(name, transport, tmp_path / name / "mirror")
        node.connect()
        nodes.append(node)
        return node

    yield connect
    for node in nodes:
        node.close()


# --- the contract: every transport keeps it; there will be more of them ---


@pytest.fixture(params=[True, False], ids=["local, shared files", "local, sent files"])
def node(request: pytest.FixtureRequest, connect: Connect) -> Node:
    return connect(shares_files=request.param)


def test_a_link_carries_frames_both_ways_and_reports_its_end(node: Node, tmp_path: Path) -> None:
    assert node.greet(tmp_path / "run").version == VERSION
    node.start("sh", "-c", "exit 3")
    assert node.expect(Exited).exit == TaskExit(code=3)
    node.link.send(Stop(1.0))
    assert node.expect(Empty) == Empty(1, 0, 0)
    node.link.send(Goodbye())
    assert node.expect(LinkClosed) == LinkClosed("the agent ended")
    assert node.close() == 0
    assert [message for message in node.received if isinstance(message, LinkClosed)] == [LinkClosed("the agent ended")]


def test_closing_a_link_leaves_no_process(node: Node, tmp_path: Path) -> None:
    node.greet(tmp_path / "run")
    pid = node.start("sleep", "600")
    assert node.close() == 0
    assert not psutil.pid_exists(pid)


@linux
def test_closing_a_link_kills_process_trees_that_ignore_sigterm(
    node: Node, tmp_path: Path, mark: dict[str, str]
) -> None:
    node.greet(tmp_path / "run")
    node.start(sys.executable, FAMILY, "--ignore-term", "child", "grandchild", "stopped", "daemon")
    log = tmp_path / "run" / "attempt-1" / "worker-0.log"

    def stands() -> None:
        assert log.read_text().endswith("stands\n")

    eventually(stands)
    assert node.close() == 0
    assert_none_left(mark, spare={os.getpid()})


def test_a_log_is_completely_received_once_its_attempt_is_empty(node: Node, tmp_path: Path) -> None:
    node.greet(tmp_path / "run")
    code = "import os, sys; sys.stdout.buffer.write(os.urandom(3_000_000)); sys.stdout.writelines(['x\\n'] * 100_000)"
    node.start(sys.executable, "-c", code)
    node.expect(Exited)
    node.link.send(Stop(1.0))
    node.expect(Empty)
    there = tmp_path / "run" / "attempt-1" / "worker-0.log"
    here = there if node.transport.shares_files else node.mirror_root / "attempt-1" / "worker-0.log"
    assert here.stat().st_size == 3_200_000
    assert hashlib.sha256(here.read_bytes()).digest() == hashlib.sha256(there.read_bytes()).digest()
    assert stat.S_IMODE(here.stat().st_mode) == 0o600


def test_the_index_of_a_log_is_received_once_its_attempt_is_empty(node: Node, tmp_path: Path) -> None:
    """It has the time of each line by the controller's clock, and the order of lines that are 0.3 s apart."""
    began = clock.now()
    node.greet(tmp_path / "run")
    node.start("sh", "-c", "echo 1; sleep 0.3; echo 2; sleep 0.3; echo 3")
    node.expect(Exited)
    node.link.send(Stop(1.0))
    node.expect(Empty)
    here = (tmp_path / "run" if node.transport.shares_files else node.mirror_root) / "attempt-1" / "worker-0.log"
    log = LogFile(TaskId("worker", 0), here)
    blocks = [*log.blocks(None)]
    log.close()
    assert b"".join(block.data for block in blocks) == b"1\n2\n3\n"
    times = [block.time for block in blocks if block.time is not None]
    assert times == sorted(times)
    assert began < times[0] < times[-1] - 0.25
    assert times[-1] < clock.now()


@pytest.mark.parametrize("node", [True], indirect=True)
def test_the_log_index_of_a_restarted_task_continues(node: Node, tmp_path: Path) -> None:
    node.greet(tmp_path / "run")
    node.start("echo", "first")
    node.expect(Exited)
    node.link.send(Start(1, [TaskStart("worker:0", Program("command", "echo", ["second"]))]))

    def has_both() -> list[int]:
        offsets, _ = parse_index((tmp_path / "run" / "attempt-1" / "worker-0.log.index").read_bytes())
        assert [*offsets] == [6, 13]
        return [*offsets]

    eventually(has_both)
    assert node.mirror_root.exists() != node.transport.shares_files  # nothing is written twice
    assert not [message for message in node.received if isinstance(message, Log)]


@linux
@pytest.mark.parametrize("victim", ["agent", "guardian"])
def test_a_link_to_a_suspended_agent_can_be_closed(
    node: Node, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "END_WAIT_S", 0.3)
    ready = node.greet(tmp_path / "run")
    task = node.start("sleep", "600")
    os.kill(ready.pid if victim == "agent" else psutil.Process(ready.pid).ppid(), signal.SIGSTOP)
    for _ in range(1000):
        node.link.send(Beat(1.0, 0))  # never blocks, though nobody reads
    assert node.close() == 0
    assert not psutil.pid_exists(task)
    node.expect(LinkClosed)


@linux
@pytest.mark.parametrize("victims", [("agent",), ("guardian",), ("agent", "guardian")], ids=" and ".join)
def test_a_killed_agent_is_reported_and_leaves_no_task(node: Node, victims: tuple[str, ...], tmp_path: Path) -> None:
    ready = node.greet(tmp_path / "run")
    task = node.start("sleep", "600")
    pids = {"agent": ready.pid, "guardian": psutil.Process(ready.pid).ppid()}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    node.expect(LinkClosed)
    node.link.send(Beat(1.0, 0))  # never fails
    assert node.close() == 0
    assert not psutil.pid_exists(task)


def test_a_link_can_be_closed_before_its_first_frame_and_twice(node: Node) -> None:
    assert node.close() == 0
    assert node.close() == 0
    node.expect(LinkClosed)


@linux
def test_closing_one_link_does_not_affect_other_nodes(connect: Connect, tmp_path: Path) -> None:
    one, other = connect(name="one"), connect(name="other")
    for node in (one, other):
        node.greet(tmp_path / f"{node.name}-run")
    ended, stays = one.start("sleep", "600"), other.start("sleep", "600")
    assert one.close() == 0
    assert not psutil.pid_exists(ended)
    assert psutil.pid_exists(stays)
    other.link.send(Stop(1.0))
    assert other.expect(Exited).exit == TaskExit(signal=signal.SIGTERM)
    assert other.close() == 0


@linux
def test_closing_a_link_does_not_affect_earlier_processes(connect: Connect, tmp_path: Path) -> None:
    with psutil.Popen(["sleep", "600"]) as earlier:
        node = connect()
        node.greet(tmp_path / "run")
        assert node.close() == 0
        assert earlier.poll() is None
        earlier.kill()


def test_the_stderr_of_an_agent_is_kept_in_a_private_file(connect: Connect, tmp_path: Path) -> None:
    node = connect(python=program(tmp_path, "sys.stderr.write('no module named x\\n')"))
    node.expect(LinkClosed)
    node.close()
    errors = tmp_path / "here.stderr"
    assert errors.read_text() == "no module named x\n"
    assert stat.S_IMODE(errors.stat().st_mode) == 0o600


# --- broken agents, and programs that are not agents: a program in place of the interpreter plays them ---


def program(folder: Path, code: str) -> str:
    """A program to be started as the agent; `say` writes bytes of its stream and waits until they have been taken."""
    path = folder / "fake-python"
    path.write_text(f"""#!{sys.executable}
import array, fcntl, os, sys, termios, time

def say(data):
    os.write(1, data)
    unread = array.array("i", [1])
    while unread[0]:
        time.sleep(0.001)
        fcntl.ioctl(1, termios.FIONREAD, unread)

{code}
""")
    path.chmod(0o755)
    return str(path)


def test_the_start_marker_may_arrive_separately(connect: Connect, tmp_path: Path) -> None:
    node = connect(python=program(tmp_path, f"say({MARKER!r}); say({encode(Listening('worker:0', 2.0))!r})"))
    assert node.expect(Listening) == Listening("worker:0", 2.0)
    assert node.expect(LinkClosed) == LinkClosed("the agent ended")


@pytest.mark.parametrize(
    "code",
    [
        f"say(b'Welcome to gpu-b\\n' + {MARKER!r} + {encode(Listening('worker:0', 2.0))!r})",
        f"say(b'\\xff\\x1e' * 500_000 + {MARKER!r}); say({encode(Listening('worker:0', 2.0))!r})",
        f"[say(bytes([byte])) for byte in b'motd\\x1edist' + {MARKER!r} + {encode(Listening('worker:0', 2.0))!r}]",
    ],
    ids=["at once", "a megabyte", "byte by byte"],
)
def test_output_before_the_start_marker_is_skipped(connect: Connect, tmp_path: Path, code: str) -> None:
    node = connect(python=program(tmp_path, code))
    assert node.expect(Listening) == Listening("worker:0", 2.0)


def test_output_without_a_start_marker_is_shown_in_the_error(connect: Connect, tmp_path: Path) -> None:
    node = connect(python=program(tmp_path, "print('x' * 100_000); print('bash: no job control in this shell')"))
    reason = node.expect(LinkClosed).reason
    assert reason.startswith("the agent sent no start marker, only: ")
    assert reason.endswith("bash: no job control in this shell")
    assert len(reason) < 500


def test_an_agent_that_ends_without_output_is_reported(connect: Connect) -> None:
    node = connect(python="/bin/true")
    assert node.expect(LinkClosed) == LinkClosed("the agent sent no start marker")
    assert node.close() == 0


@pytest.mark.parametrize(
    ("python", "error"), [("/no/such/python", errno.ENOENT), ("/dev/null", errno.EACCES), ("/", errno.EACCES)]
)
def test_an_interpreter_that_cannot_be_started_raises_os_error(connect: Connect, python: str, error: int) -> None:
    descriptors = open_descriptors()
    with pytest.raises(OSError, match=python) as caught:
        connect(python=python)
    assert caught.value.errno == error
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"nonsense\n", "the agent sent not a header: b'nonsense'"),
        (b'{"type":"Log","attempt":1,"task":"worker:0","offset":0,"length":4294967296}\n', "is not between 0 and"),
        (encode(Log(1, "../../../outside", 0, 1), b"x"), "'../../../outside' is not a task"),
        (encode(Log(1, "worker:0/../x", 0, 1), b"x"), "'worker:0/../x' is not a task"),
        (encode(Log(1, "\0", 0, 1), b"x"), "is not a task"),
        (encode(Log(1, "worker:0", -1, 1), b"x"), "Log.offset: -1 is not between"),
        (encode(Log(1, "worker:0", 1 << 70, 1), b"x"), "the agent sent "),
    ],
)
def test_an_invalid_frame_ends_the_link_and_writes_no_file(
    connect: Connect, tmp_path: Path, sent: bytes, reason: str
) -> None:
    node = connect(python=program(tmp_path, f"say({MARKER!r} + {sent!r}); sys.stdin.read()"))
    assert reason in node.expect(LinkClosed).reason
    node.close()
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size}
    assert written == {"fake-python"}


def test_frames_before_an_invalid_frame_are_delivered(connect: Connect, tmp_path: Path) -> None:
    log = encode(Log(1, "worker:0", 0, BODY_LIMIT), bytes(BODY_LIMIT))
    (tmp_path / "frames").write_bytes(MARKER + encode(Listening("worker:0", 2.0)) + log + b"?\n")
    node = connect(python=program(tmp_path, f"os.write(1, open({str(tmp_path / 'frames')!r}, 'rb').read())"))
    assert node.expect(Listening) == Listening("worker:0", 2.0)
    assert "not a header" in node.expect(LinkClosed).reason
    assert_same_bytes((node.mirror_root / "attempt-1" / "worker-0.log").read_bytes(), bytes(BODY_LIMIT))


def test_a_received_log_that_cannot_be_written_ends_the_link(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "here" / "mirror").mkdir(parents=True)
    (tmp_path / "here" / "mirror" / "attempt-1").touch()
    node = connect(
        python=program(tmp_path, f"say({MARKER + encode(Log(1, 'worker:0', 0, 1), b'x')!r}); sys.stdin.read()")
    )
    assert "its log cannot be written: " in node.expect(LinkClosed).reason


# --- the mirror ---


def named(tmp_path: Path) -> LogMirror:
    return LogMirror(lambda attempt, task: tmp_path / f"{attempt}-{task}")


def test_the_log_mirror_writes_pieces_at_their_offsets(tmp_path: Path) -> None:
    mirror = named(tmp_path)
    mirror.write(Log(1, "a", 0, 3), b"hel")
    mirror.write(Log(2, "a", 0, 1), b"x")
    mirror.write(Log(1, "a", 3, 2), b"lo")
    mirror.write(Log(1, "a", 1, 3), b"ell")  # again, after a link that dropped
    mirror.close()
    assert (tmp_path / "1-a").read_bytes() == b"hello"
    assert (tmp_path / "2-a").read_bytes() == b"x"


@pytest.mark.parametrize("offset", [4, 1 << 43])
def test_the_log_mirror_rejects_a_piece_that_leaves_a_gap(tmp_path: Path, offset: int) -> None:
    mirror = named(tmp_path)
    mirror.write(Log(1, "a", 0, 3), b"hel")
    with pytest.raises(ProtocolError, match=f"a log piece at offset {offset:,} after 3 bytes"):
        mirror.write(Log(1, "a", offset, 2), b"lo")
    mirror.close()
    assert (tmp_path / "1-a").read_bytes() == b"hel"


def test_the_log_mirror_closes_files_of_old_attempts_and_drops_late_pieces(tmp_path: Path) -> None:
    mirror, descriptors = named(tmp_path), open_descriptors()
    for attempt in range(1, 20):
        mirror.begin(attempt)
        for task in range(64):
            mirror.write(Log(attempt, f"worker:{task}", 0, 1), b"x")
        assert len(open_descriptors()) <= len(descriptors) + 64
    mirror.write(Log(3, "worker:1", 1, 1), b"y")
    mirror.close()
    mirror.write(Log(19, "worker:1", 1, 1), b"y")
    assert open_descriptors() <= descriptors
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"x"}
    assert len([*tmp_path.iterdir()]) == 19 * 64


def test_the_log_mirror_writes_more_logs_than_it_keeps_open(tmp_path: Path) -> None:
    mirror, descriptors = named(tmp_path), open_descriptors()
    for offset in range(3):
        for task in range(3 * OPEN_LOGS):
            mirror.write(Log(1, f"worker:{task}", offset, 1), b"%d" % offset)
        assert len(open_descriptors()) <= len(descriptors) + OPEN_LOGS
    mirror.close()
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"012"}
    assert open_descriptors() <= descriptors


@pytest.mark.slow
def test_the_log_mirror_can_be_closed_while_pieces_are_written(tmp_path: Path) -> None:
    """Links have threads of their own; none of them may fail, and no file may stay open."""
    descriptors, failures, rounds = open_descriptors(), list[BaseException](), 60
    for number in range(rounds):
        mirror, stop = named(tmp_path / str(number)), threading.Event()

        def write(first: int, mirror: LogMirror = mirror, stop: threading.Event = stop) -> None:
            try:
                while not stop.is_set():
                    for task in range(first, first + 40):
                        mirror.write(Log(1, f"worker:{task}", 0, 1), b"x")
            except BaseException as error:  # noqa: BLE001 - the test reports it
                failures.append(error)

        threads = [threading.Thread(target=write, args=(first,)) for first in range(0, 160, 40)]
        for thread in threads:
            thread.start()
        wait_until((tmp_path / str(number)).exists, "a piece is written")
        mirror.begin(1 + number % 2)
        mirror.close()
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert open_descriptors() <= descriptors
