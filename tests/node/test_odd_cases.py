"""How single parts of distlaunch handle rare behaviour of a connection, a node or the other side."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import paramiko
import pytest

from launcher.rundir.owner import find_left_processes
from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.reconnect import Reconnector
from launcher.transports.ssh.config import parse_target
from launcher.transports.ssh.connect import _check_host_key, connect
from launcher.transports.ssh.known_hosts import load_known_keys
from launcher.transports.streams import ask, skip_noise
from tests.harness.apart import linux
from tests.harness.hosts import loopback
from tests.harness.processes.agent_streams import FarEnd, Pipes
from tests.harness.witness import open_descriptors, wait_until
from worker_entry.agent import cleanup
from worker_entry.agent.checks.answers import NodeChecks
from worker_entry.agent.checks.inspection import inspect
from worker_entry.agent.connection import handover as reattachments
from worker_entry.agent.connection import reattach_calls, reattach_folder
from worker_entry.agent.connection.connection import Connection, Opening
from worker_entry.agent.connection.lease import Lease
from worker_entry.agent.connection.reattach_calls import receive_call
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.tasks import stacks
from worker_entry.agent.tasks.stacks import ActivityWatch
from worker_entry.agent.tasks.task import StartedTask, _find_problem
from worker_entry.program.finding import find_problem
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import (
    Attached,
    Broken,
    Empty,
    Exited,
    Inspected,
    Log,
    Message,
    Prepared,
    Ready,
)
from worker_entry.protocol.orders import (
    AGENT_GONE,
    VERSION,
    Attach,
    Clean,
    Goodbye,
    Hello,
    Inspect,
    Prepare,
    Start,
    Stop,
)
from worker_entry.protocol.resend_buffer import is_counted
from worker_entry.protocol.values import Activity, Program, TaskRequest, TaskStart
from worker_entry.system import kernel, mutual_waits, peer, process_use
from worker_entry.system.agent_kernel import SystemKernel
from worker_entry.system.files import end_of_hole, last_data
from worker_entry.system.machine import process_view
from worker_entry.system.tcp_timeout import TcpTimeout

ATTACH = Attach(VERSION, "/tmp/agent-x", 0, 0, {})


class WakingEnd(FarEnd):
    """A stream whose reader wakes up when it is abandoned, as with a socket."""

    def abandon(self) -> None:
        super().abandon()
        self.from_agent.put(None)


class Chatterbox(FarEnd):
    """A login shell that never stops printing."""

    def read(self, size: int, timeout_s: float) -> bytes:
        return b"Welcome!\n"


# --- a stream that was just opened ---


@pytest.mark.parametrize(("end", "told"), [(b"", "it ended without an answer"), (None, "the connection broke")])
def test_a_query_without_an_answer_raises_and_closes_its_stream(end: bytes | None, told: str) -> None:
    far = FarEnd()
    far.from_agent.put(b"motd\n" + MARKER)
    far.from_agent.put(end)
    with pytest.raises(LinkError, match=told):
        ask(far, Clean(VERSION, [], None), 1.0)
    assert far.is_cut


def test_endless_output_before_the_start_marker_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=r"(?s)^no start marker, only: .*Welcome!$"):
        skip_noise(Chatterbox(), 0.02)


# --- reconnecting ---


def test_giving_up_ends_the_current_reconnect_try_without_another() -> None:
    far = WakingEnd()
    tries: list[float] = []

    def reopen(within_s: float) -> FarEnd:
        tries.append(within_s)
        return far

    reconnector = Reconnector(reopen)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reconnector.find, LinkBroken("cable pulled"), ATTACH, time.monotonic() + 600, 600.0)
        wait_until(lambda: far.heard() == [ATTACH], "it waits for the agent's answer")
        reconnector.give_up()
        with pytest.raises(LinkError, match=r"^cable pulled$"):
            found.result(10)
    assert (far.is_cut, len(tries)) == (True, 1)


def test_giving_up_during_a_reconnect_closes_the_new_stream() -> None:
    far = WakingEnd()

    def reopen(_: float) -> FarEnd:
        reconnector.give_up()
        return far

    reconnector = Reconnector(reopen)
    with pytest.raises(LinkError, match=r"^cable pulled$"):
        reconnector.find(LinkBroken("cable pulled"), ATTACH, time.monotonic() + 600, 600.0)
    assert (far.is_cut, far.heard()) == (True, [])


# --- an SSH server ---


def test_an_ssh_server_that_stops_after_its_version_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        accepted = pool.submit(server.accept)
        target = parse_target("gpu-a", f"hostname 127.0.0.1\nport {port}\nuser x\nuserknownhostsfile none\n")
        threading.Thread(target=lambda: accepted.result()[0].sendall(b"SSH-2.0-odd\r\n")).start()
        with pytest.raises(LinkError, match=f"127.0.0.1:{port} does not speak SSH: no handshake within 1 s$"):
            connect(target, cancelled=threading.Event(), within_s=0.6, attempts=1)
        accepted.result()[0].close()


def test_a_host_key_that_cannot_be_saved_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known_hosts = tmp_path / "file" / "known_hosts"
    target = parse_target("gpu-a", f"user x\nuserknownhostsfile {known_hosts}\n")
    key = paramiko.ECDSAKey.generate()
    believed: list[str] = []
    with pytest.raises(LinkError, match=f"cannot be written to {known_hosts}: "):
        _check_host_key(target, load_known_keys("gpu-a", target.known_hosts), key, believed.append)
    assert believed == []


# --- calls to an agent ---


@pytest.fixture
def folder() -> Iterator[ReattachFolder]:
    """The folder of an agent; this process is the agent."""
    folder = ReattachFolder.make()
    assert folder is not None
    folder.listen()
    yield folder
    folder.close(0)


ANOTHER_VERSION = Attach(VERSION + 1, "/tmp/agent-x", 0, 0, {})


@linux
@pytest.mark.parametrize(
    "sent", [b"garbage\n", encode(ANOTHER_VERSION), encode(ATTACH)[:10]], ids=["garbage", "version", "half"]
)
def test_an_invalid_reattach_call_gets_an_error_and_leaks_no_descriptor(folder: ReattachFolder, sent: bytes) -> None:
    before = open_descriptors()
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(os.path.join(folder.path, "socket"))
        socket.send_fds(call, [sent], [0, writer])
        call.shutdown(socket.SHUT_WR)
        assert receive_call(folder.accept()) is None
        assert call.recv(1) == reattach_calls.TAKEN
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        [(answer, _)] = Decoder().feed(stream.read().removeprefix(MARKER))
    assert isinstance(answer, Broken)
    assert answer.problem.reference == "protocol-error"
    assert open_descriptors() <= before


@linux
@pytest.mark.parametrize("descriptors", [[], [0]])
@pytest.mark.parametrize("sent", [b"", encode(ATTACH)], ids=["nothing", "attach"])
def test_a_reattach_call_without_a_connection_is_rejected_and_leaks_no_descriptor(
    folder: ReattachFolder, descriptors: list[int], sent: bytes
) -> None:
    before = open_descriptors()
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(os.path.join(folder.path, "socket"))
        if sent:
            socket.send_fds(call, [sent], descriptors)
        call.shutdown(socket.SHUT_WR)
        assert receive_call(folder.accept()) is None
        assert call.recv(1) == reattach_calls.NOT_NEEDED
    assert open_descriptors() <= before


@linux
def test_an_agent_ignores_a_reattach_call_of_another_user(
    folder: ReattachFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other user can enter the folder; even if it is open, the kernel reports the user of the caller."""
    monkeypatch.setattr(peer, "find_peer", lambda _: peer.Peer(1, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(os.path.join(folder.path, "socket"))
        call.sendall(encode(Goodbye()))
        assert receive_call(folder.accept()) is None
        with contextlib.suppress(ConnectionResetError):  # its data was not read
            assert call.recv(1) == b""
    assert stat.S_IMODE(os.stat(os.path.join(folder.path, "socket")).st_mode) == 0o600


# --- an attach process ---


def answer_of(way: Pipes) -> tuple[list[Message], int]:
    """All messages of a process, and its exit status."""
    said = b""
    while data := way.read(1 << 16, 30.0):
        said += data
    assert said == b"" or said.startswith(MARKER)
    return [message for message, _ in Decoder().feed(said[len(MARKER) :])], way.process.wait(30)


@contextmanager
def started(verb: str, *sent: bytes) -> Iterator[Pipes]:
    way = Pipes(verb, {})
    try:
        for data in sent:
            way.write(data)
        yield way
    finally:
        way.process.kill()
        way.process.wait()
        way.abandon()


@pytest.mark.parametrize("verb", ["attach", "clean"])
@pytest.mark.parametrize("sent", [b"garbage\n", encode(Goodbye()), b""], ids=["garbage", "another", "end"])
def test_attach_and_clean_exit_with_an_error_after_an_unexpected_message(verb: str, sent: bytes) -> None:
    with started(verb, sent) as way:
        way.finish()
        [answer], status = answer_of(way)
    assert isinstance(answer, Broken)
    assert (answer.problem.reference, status) == ("protocol-error", 1)


def test_attach_reports_that_an_agent_without_folder_and_process_has_ended(tmp_path: Path) -> None:
    attach = Attach(VERSION, str(tmp_path / "gone"), 0, 0, {}, process_view=process_view())
    with started("attach", encode(attach)) as way:
        [answer], status = answer_of(way)
    assert isinstance(answer, Broken)
    assert (answer.problem.reference, status) == (AGENT_GONE, 1)


def test_attach_exits_silently_if_the_agent_has_too_many_callers(folder: ReattachFolder) -> None:
    callers: list[socket.socket] = []
    try:
        while True:
            callers.append(socket.socket(socket.AF_UNIX))
            callers[-1].setblocking(False)
            callers[-1].connect(os.path.join(folder.path, "socket"))
    except BlockingIOError:
        with started("attach", encode(Attach(VERSION, folder.path, 0, 0, {}))) as way:
            assert answer_of(way) == ([], 1)
    for caller in callers:
        caller.close()


def test_attach_stops_waiting_for_a_guardian_that_does_not_end(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    with file.open() as guardian, file.open() as lock:
        fcntl.flock(guardian, fcntl.LOCK_EX)
        assert reattachments._await_end(lock.fileno(), time.monotonic() + 0.05) == 1


# --- an agent that does not end ---


STUBBORN = """
import os, signal, subprocess, sys, time
from worker_entry.agent.connection.reattach_folder import ReattachFolder
signal.signal(signal.SIGHUP, signal.SIG_IGN)
folder = ReattachFolder.make()
folder.note_run(sys.argv[1])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(folder.path, flush=True)
time.sleep(600)
"""


@linux
def test_an_unresponsive_guardian_is_killed_with_all_descendants() -> None:
    run_id = f"stubborn-{os.getpid()}"
    env = {**os.environ, "DISTLAUNCH_RUN_ID": run_id}
    command = [sys.executable, "-c", STUBBORN, run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as guardian:
        assert guardian.stdout is not None
        path = guardian.stdout.readline().strip()
        # A process has no environment for a moment after its start.
        wait_until(lambda: len(find_left_processes(run_id)) == 2, "both have their environment")
        assert cleanup.find_agents([run_id]) == [path]
        assert cleanup.end_agents([path], 0.1)
        assert guardian.wait(10) == -signal.SIGKILL
        wait_until(lambda: find_left_processes(run_id) == [], "nothing is left")
    reattach_folder.remove_abandoned(os.path.dirname(path))
    assert not Path(path).exists()


def test_agents_are_found_by_their_run_id(
    folder: ReattachFolder,
) -> None:
    run_id = f"found-{os.getpid()}"
    assert cleanup.find_agents([run_id]) == []
    folder.note_run(run_id)
    assert cleanup.find_agents([run_id]) == [folder.path]


STUCK = """
import sys
from worker_entry.agent import cleanup, cleanup
cleanup.AGENT_END_S = cleanup.KILL_S = 0.05
sys.exit(cleanup.main())
"""


def test_clean_reports_an_agent_that_cannot_be_stopped(folder: ReattachFolder) -> None:
    """Its guardian is invisible here, as if it ran in another container."""
    (Path(folder.path) / "guardian").unlink()
    order = encode(Clean(VERSION, [], folder.path))
    ran = subprocess.run([sys.executable, "-c", STUCK], input=order, capture_output=True, timeout=30, check=False)
    [(answer, _)] = Decoder().feed(ran.stdout.removeprefix(MARKER))
    assert isinstance(answer, Broken), ran.stderr
    assert (answer.problem.reference, ran.returncode) == ("agent-alive", 1)


EXPIRED = """
import os, time
from worker_entry.agent.guardian import _guard
from worker_entry.agent.connection.lease import LoopCounter
from worker_entry.system import clock
clock.share()
counter = LoopCounter(600.0)
agent = os.fork()
while agent == 0:
    counter.advance(clock.steady(clock.now()) - 60.0)
    time.sleep(0.01)
os._exit(_guard(agent, counter))
"""


def test_a_guardian_kills_an_agent_that_runs_after_its_lease() -> None:
    ran = subprocess.run([sys.executable, "-c", EXPIRED], capture_output=True, timeout=30, text=True, check=False)
    assert ran.returncode == 128 + signal.SIGKILL
    assert ran.stderr.startswith("killing the agent, which still runs although its lease has expired\n")


def read_until(way: Pipes, decoder: Decoder, last: type) -> list[tuple[Message, bytes]]:
    """What a process sends, including logs, up to the first message of type `last`."""
    heard: list[tuple[Message, bytes]] = []
    while not any(isinstance(message, last) for message, _ in heard):
        heard += decoder.feed(way.read(1 << 16, 30.0).removeprefix(MARKER))
    return heard


def test_an_unreceived_end_of_an_attempt_is_resent_after_its_logs(tmp_path: Path) -> None:
    program = Program("command", "echo", ["done"])
    ports = loopback.ports()
    hello = Hello(VERSION, "test", str(tmp_path / "run"), str(tmp_path), 30.0, True)
    prepare = Prepare(1, [TaskRequest("worker:0", program)], ports[0], ports[-1])
    with started("node", encode(hello), encode(prepare)) as node:
        decoder = Decoder()
        heard = read_until(node, decoder, Prepared)
        node.write(encode(Start(1, [TaskStart("worker:0", program)])))
        heard += read_until(node, decoder, Exited)
        node.write(encode(Stop(0.0)))
        heard += read_until(node, decoder, Empty)
        ready = heard[0][0]
        assert isinstance(ready, Ready)
        assert ready.reattach_folder is not None
        arrived = sum(is_counted(message) for message, _ in heard) - 1  # all but Empty
        with started("attach", encode(Attach(VERSION, ready.reattach_folder, arrived, 1, {"worker:0": 0}))) as way:
            again = read_until(way, Decoder(), Empty)
            assert [type(message) for message, _ in again] == [Attached, Log, Empty]
            assert again[1][1] == b"done\n"
            way.write(encode(Goodbye()))
            assert node.process.wait(30) == 0


def test_an_agent_refuses_a_reattach_with_too_many_received_frames_and_continues(tmp_path: Path) -> None:
    hello = encode(Hello(VERSION, "test", str(tmp_path / "run"), str(tmp_path), 30.0, True))
    with started("node", hello) as node:
        [(ready, _)] = read_until(node, Decoder(), Ready)
        assert isinstance(ready, Ready)
        assert ready.reattach_folder is not None
        with started("attach", encode(Attach(VERSION, ready.reattach_folder, 999, 0, {}))) as way:
            [answer], status = answer_of(way)
        assert isinstance(answer, Broken)
        assert answer.problem.message == "the agent was sent 999 frames received, which is not between 0 and 1"
        assert status == 1
        node.write(encode(Goodbye()))
        assert node.process.wait(30) == 0


# --- an agent's connection ---


@contextmanager
def connected(end: socket.socket) -> Iterator[tuple[Connection, selectors.BaseSelector, list[str]]]:
    """A connection over this socket, its selector, and the names of the callbacks that were called."""
    called: list[str] = []
    with selectors.DefaultSelector() as selector:
        connection = Connection(
            selector,
            lambda: called.append("input"),
            lambda: called.append("break"),
            Lease(60.0, far=False, kernel=SystemKernel()),
            SystemKernel(),
        )
        connection.open(Opening(os.dup(end.fileno()), os.dup(end.fileno())))
        yield connection, selector, called
        connection.close()


def write_once(connection: Connection, selector: selectors.BaseSelector) -> None:
    """Writes what the socket takes, whether or not the selector has reported it writable."""
    connection.want_write()
    [write] = [key.data for key in selector.get_map().values() if key.events & selectors.EVENT_WRITE]
    write()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The agent's end of a TCP connection, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_an_agent_connection_without_input_stays_open_until_it_is_reset(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    with connected(ours) as (connection, _, _):
        nothing = connection.read()
        assert nothing is not None
        assert [*nothing] == []
        reset(theirs)
        assert connection.read() is None


def test_a_blocked_agent_connection_keeps_its_data_and_reports_a_reset(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    with connected(ours) as (connection, selector, called):
        sent = Log(1, "worker:0", 0, 1 << 24)
        connection.send(sent, bytes(sent.length))
        left = None
        while left != connection.pending:  # until the socket takes no more
            left = connection.pending
            write_once(connection, selector)
        assert left
        assert called == []
        reset(theirs)
        write_once(connection, selector)
        assert called == ["break"]


# --- an agent's checks ---


def test_a_port_responder_reports_a_port_that_was_taken() -> None:
    with socket.create_server(("", 0)) as taken, selectors.DefaultSelector() as selector:
        checks = NodeChecks(selector, lambda message: None)
        [problem] = checks.open_responders({"worker:0": taken.getsockname()[1]}, "nonce")
        checks.close()
    assert problem.reference == "port-refused"
    assert problem.message.startswith("cannot listen on a port: ")


def inspected(folder: Path, kind: str, target: str, shared: str = "", mark: str = "") -> Inspected:
    return inspect(Inspect(Program(kind, target, []), shared, mark), str(folder), str(folder))


def test_an_inspection_reports_a_mark_file_that_cannot_be_written(tmp_path: Path) -> None:
    mark = {"shared": str(tmp_path), "mark": "abc"}
    assert inspected(tmp_path, "command", "true", **mark).problem == ""
    assert inspected(tmp_path, "command", "true", **mark).problem == "File exists"


@pytest.mark.parametrize(("kind", "target"), [("script", "program"), ("module", "program.train")])
def test_the_program_hash_depends_on_all_python_files_of_the_program(tmp_path: Path, kind: str, target: str) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        for name in ("z.py", "__main__.py", "inner/a.py"):
            (folder / "program" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "program" / name).write_text(name)
    (folders[0] / "program" / "log.txt").touch()
    hashes = {inspected(folder, kind, target).program_hash for folder in folders}
    assert len(hashes) == 1
    assert "" not in hashes
    (folders[1] / "program" / "inner" / "a.py").rename(folders[1] / "program" / "inner" / "b.py")
    assert inspected(folders[1], kind, target).program_hash not in hashes


@linux
def test_an_unreadable_program_has_no_hash(tmp_path: Path) -> None:
    assert inspected(tmp_path, "script", "/proc/self/mem").program_hash == ""  # not even by root


@linux
def test_the_activity_of_a_task_is_unknown_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LINUX", False)
    assert ActivityWatch(SystemKernel()).report(dict.fromkeys(["worker:0"], cast("StartedTask", None)), {}, ()) == {
        "worker:0": Activity()
    }


@linux
def test_a_sample_of_one_process_does_not_change_the_measured_task_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child used much processor time before the measurement; the task is idle nevertheless."""
    monkeypatch.setattr(stacks, "SHORTEST_S", 0.0)
    monkeypatch.setattr(
        process_use, "read_use", lambda pid: SimpleNamespace(cpu_s=900.0 * (pid == 8), read=0, written=0)
    )
    monkeypatch.setattr(kernel, "descendants", lambda _: [SimpleNamespace(pid=8)])
    idle = SimpleNamespace(pid=7, running=True, log=SimpleNamespace(size=lambda: 0))
    tasks, watch, now = {"worker:0": cast("StartedTask", idle)}, ActivityWatch(SystemKernel()), time.monotonic()
    watch.poll(tasks, now - 100)
    watch.begin(tasks)
    watch.poll(tasks, now)  # is due during the measurement
    activity = watch.report(tasks, {"worker:0": ""}, ())["worker:0"]
    assert activity.idle_s is not None
    assert activity.idle_s >= 100


@linux
@pytest.mark.parametrize(("children", "asked"), [([], {7: "its stack"}), ([SimpleNamespace(pid=8)], {})])
def test_a_task_with_a_child_does_not_wait_for_tasks_alone(
    monkeypatch: pytest.MonkeyPatch, children: list[SimpleNamespace], asked: dict[int, str]
) -> None:
    monkeypatch.setattr(process_use, "read_use", lambda _: SimpleNamespace(cpu_s=0.0, read=0, written=0))
    monkeypatch.setattr(kernel, "descendants", lambda _: children)
    said: list[dict[int, str]] = []

    def find(texts: dict[int, str], ports: object) -> set[int]:
        del ports
        said.append(texts)
        return {*texts}

    monkeypatch.setattr(mutual_waits, "find_waiting", find)
    idle = SimpleNamespace(pid=7, running=True, log=SimpleNamespace(size=lambda: 0))
    tasks, watch = {"worker:0": cast("StartedTask", idle)}, ActivityWatch(SystemKernel())
    watch.begin(tasks)
    assert watch.report(tasks, {"worker:0": "its stack"}, ())["worker:0"].is_stuck is bool(asked)
    assert said == [asked]


# --- a task's start ---


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errno.ENOSPC, "the disk of the run directory is full"),
        (errno.EAGAIN, "no more processes can be started there"),
        (errno.EIO, "Input/output error: train.py"),
    ],
)
def test_a_failed_task_start_is_reported_with_its_reason(error: int, told: str) -> None:
    start = TaskStart("worker:1", Program("script", "train.py", []))
    problem = _find_problem(start, OSError(error, os.strerror(error)))
    assert (problem.reference, problem.message, problem.task) == ("start-failed", told, "worker:1")


# --- a system ---


def test_a_file_counts_as_all_data_if_holes_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    with file.open("w+b") as log:
        for place in (0, 1 << 20, 1 << 21):
            log.seek(place)
            log.write(b"data")
        log.flush()
        size = file.stat().st_size
        if end_of_hole(log.fileno(), 1 << 16) == 1 << 20:  # the file system has holes
            assert last_data(log.fileno())[0] == 1 << 21
        assert last_data(log.fileno(), extents=1) == (0, size)  # too many extents to read
        monkeypatch.delattr(os, "SEEK_DATA")
        assert end_of_hole(log.fileno(), 1 << 16) == 1 << 16
        assert last_data(log.fileno()) == (0, size)


@linux
def test_extending_tcp_timeouts_ignores_ended_processes_and_sockets() -> None:
    with subprocess.Popen(["true"]) as ended, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
        timeout = TcpTimeout(60.0)
        timeout.poll([ended.pid])
        ended.wait()
        again = TcpTimeout(60.0)
        again.poll([ended.pid])
        pidfd = os.pidfd_open(living.pid)
        again._extend(pidfd, 1 << 20)
        os.close(pidfd)


@pytest.mark.parametrize(
    ("demo", "reference", "names", "packages"),
    [
        ("train", "no-tensorflow", "TensorFlow is", "tensorflow"),
        ("train_jax", "no-jax", "JAX and Keras are", "jax keras"),
    ],
)
def test_a_demo_is_refused_on_a_python_without_its_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: str, reference: str, names: str, packages: str
) -> None:
    for package in ("tensorflow", "jax", "keras"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    problem = find_problem(Program("module", f"worker_entry.demo.{demo}", []), str(tmp_path))
    assert problem is not None
    assert (problem.reference, problem.message) == (reference, f"{names} not installed for /opt/venv/bin/python")
    assert problem.hint.startswith(f"run: /opt/venv/bin/python -m pip install {packages}; or name a Python")
    assert find_problem(Program("module", "train", []), str(tmp_path)) is None
