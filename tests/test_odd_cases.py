"""What a connection, a node or the other side seldom does: a part of distlaunch at a time, against it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import paramiko
import pytest

from launcher.run.left_processes import find_left_processes
from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.reconnect import Reconnector
from launcher.transports.ssh.config import parse_target
from launcher.transports.ssh.connect import _check_host_key, connect
from launcher.transports.ssh.known_hosts import load_known_keys
from launcher.transports.streams import ask, skip_noise
from tests.apart import linux
from tests.test_reconnect import FarEnd, Pipes
from tests.witness import open_descriptors, wait_until
from worker_entry.agent import reattach
from worker_entry.agent import reattachment as reattachments
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Broken, Message
from worker_entry.protocol.orders import AGENT_GONE, VERSION, Attach, Clean, Goodbye

ATTACH = Attach(VERSION, "/tmp/agent-x", 0, 0, {})


class WakingEnd(FarEnd):
    """Whoever reads is woken when it is abandoned, as with a socket."""

    def abandon(self) -> None:
        super().abandon()
        self.from_agent.put(None)


class Chatterbox(FarEnd):
    """A login shell that never comes to an end."""

    def read(self, size: int, timeout_s: float) -> bytes:
        return b"Welcome!\n"


# --- a stream that was just opened ---


@pytest.mark.parametrize(("end", "told"), [(b"", "it ended without an answer"), (None, "the connection broke")])
def test_a_question_without_an_answer_is_an_error_and_its_stream_is_closed(end: bytes | None, told: str) -> None:
    far = FarEnd()
    far.from_agent.put(b"motd\n" + MARKER)
    far.from_agent.put(end)
    with pytest.raises(LinkError, match=told):
        ask(far, Clean(VERSION, [], None), 1.0)
    assert far.is_cut


def test_noise_that_does_not_end_is_not_read_for_ever() -> None:
    with pytest.raises(ProtocolError, match=r"(?s)^no start marker, only: .*Welcome!$"):
        skip_noise(Chatterbox(), 0.02)


# --- reconnecting ---


def test_giving_up_ends_a_try_and_there_is_no_other() -> None:
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


def test_giving_up_while_a_stream_is_opened_closes_the_stream() -> None:
    far = WakingEnd()

    def reopen(_: float) -> FarEnd:
        reconnector.give_up()
        return far

    reconnector = Reconnector(reopen)
    with pytest.raises(LinkError, match=r"^cable pulled$"):
        reconnector.find(LinkBroken("cable pulled"), ATTACH, time.monotonic() + 600, 600.0)
    assert (far.is_cut, far.heard()) == (True, [])


# --- an SSH server ---


def test_a_server_that_says_its_version_and_nothing_more_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        accepted = pool.submit(server.accept)
        target = parse_target("gpu-a", f"hostname 127.0.0.1\nport {port}\nuser x\nuserknownhostsfile none\n")
        threading.Thread(target=lambda: accepted.result()[0].sendall(b"SSH-2.0-odd\r\n")).start()
        with pytest.raises(LinkError, match=f"127.0.0.1:{port} does not speak SSH: no handshake within 1 s$"):
            connect(target, cancelled=threading.Event(), within_s=0.6, attempts=1)
        accepted.result()[0].close()


def test_a_host_key_that_cannot_be_remembered_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known_hosts = tmp_path / "file" / "known_hosts"
    target = parse_target("gpu-a", f"user x\nuserknownhostsfile {known_hosts}\n")
    key = paramiko.ECDSAKey.generate()
    believed: list[str] = []
    with pytest.raises(LinkError, match=f"cannot be written into {known_hosts}: "):
        _check_host_key(target, load_known_keys("gpu-a", target.known_hosts), key, believed.append)
    assert believed == []


# --- what calls an agent ---


@pytest.fixture
def folder() -> Iterator[reattach.ReattachFolder]:
    """Of an agent that is this process."""
    folder = reattach.ReattachFolder.make()
    assert folder is not None
    folder.listen()
    yield folder
    folder.close(0)
    os.close(folder.lock)


def say_garbage(call: socket.socket) -> None:
    socket.send_fds(call, [b"garbage\n"], [0, 1])


def say_another_version(call: socket.socket) -> None:
    socket.send_fds(call, [encode(Attach(VERSION + 1, "/tmp/agent-x", 0, 0, {}))], [0, 1])


def say_half_a_frame(call: socket.socket) -> None:
    socket.send_fds(call, [encode(ATTACH)[:10]], [0, 1])
    call.shutdown(socket.SHUT_WR)


def bring_no_connection(call: socket.socket) -> None:
    call.sendall(encode(ATTACH))


def say_nothing(call: socket.socket) -> None:
    call.shutdown(socket.SHUT_WR)


@linux
@pytest.mark.parametrize("say", [say_garbage, say_another_version, say_half_a_frame, bring_no_connection, say_nothing])
def test_a_caller_that_is_not_ours_is_sent_away_and_leaves_no_descriptor(
    folder: reattach.ReattachFolder, say: Callable[[socket.socket], None]
) -> None:
    before = open_descriptors()
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(os.path.join(folder.path, "socket"))
        say(call)
        assert folder.accept() is None
        assert call.recv(1) == reattach.NOT_NEEDED
        assert call.recv(1) == b""
    assert open_descriptors() == before


# --- an attach process ---


def answer_of(way: Pipes) -> tuple[list[Message], int]:
    """All that a process says, and its exit status."""
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
def test_a_process_that_is_sent_something_else_says_so_and_ends(verb: str, sent: bytes) -> None:
    with started(verb, sent) as way:
        way.finish()
        [answer], status = answer_of(way)
    assert isinstance(answer, Broken)
    assert (answer.problem.reference, status) == ("protocol-error", 1)


def test_an_agent_whose_folder_is_gone_has_ended(tmp_path: Path) -> None:
    with started("attach", encode(Attach(VERSION, str(tmp_path / "gone"), 0, 0, {}))) as way:
        [answer], status = answer_of(way)
    assert isinstance(answer, Broken)
    assert (answer.problem.reference, status) == (AGENT_GONE, 1)


def test_a_call_that_is_one_too_many_ends_without_a_word(folder: reattach.ReattachFolder) -> None:
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


def test_a_process_does_not_wait_for_ever_for_a_guardian_that_stays(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    file.touch()
    with file.open() as guardian, file.open() as lock:
        fcntl.flock(guardian, fcntl.LOCK_EX)
        assert reattachments._await_end(lock.fileno(), time.monotonic() + 0.05) == 1


# --- an agent that does not want to end ---


STUBBORN = """
import os, signal, subprocess, sys, time
from worker_entry.agent.reattach import ReattachFolder
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = ReattachFolder.make()
folder.note_run(sys.argv[1])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(folder.path, flush=True)
time.sleep(600)
"""


@linux
def test_a_guardian_that_does_not_react_is_killed_with_all_below_it() -> None:
    run_id = f"stubborn-{os.getpid()}"
    env = {**os.environ, "DISTLAUNCH_RUN_ID": run_id}
    command = [sys.executable, "-c", STUBBORN, run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as guardian:
        assert guardian.stdout is not None
        path = guardian.stdout.readline().strip()
        assert len(find_left_processes(run_id)) == 2
        assert reattach.find_agents([run_id]) == [path]
        assert reattach.end_agents([path], 0.1)
        assert guardian.wait(10) == -signal.SIGKILL
        wait_until(lambda: find_left_processes(run_id) == [], "nothing is left")
    reattach.remove_abandoned(os.path.dirname(path))
    assert not Path(path).exists()
