"""Which tasks only another task can wake: what a thread waits for, and what else could wake it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.apart import linux
from tests.harness.polling import eventually
from worker_entry.protocol.node_local import STACKS_SIGNAL
from worker_entry.system import mutual_waits, thread_waits
from worker_entry.system.connections import Connection, leads_outside
from worker_entry.system.mutual_waits import find_waiting
from worker_entry.system.thread_waits import Wait, read_waits

pytestmark = linux

BEGIN = f"""
import concurrent.futures, faulthandler, multiprocessing.pool, os, queue
import select, socket, subprocess, sys, threading, time
faulthandler.register({int(STACKS_SIGNAL)}, file=open("stacks", "w"))
lock, locked = threading.Lock(), threading.Lock()
locked.acquire()
server = socket.create_server(("127.0.0.1", 0))
def connect():
    return socket.create_connection(server.getsockname()), server.accept()[0]
def run(call):
    threading.Thread(target=call, daemon=True).start()
def stay():
    print("here", flush=True)
    locked.acquire()
"""
FOR_OTHERS = {
    "a lock": "stay()",
    "a with statement": "print('here', flush=True)\nwith locked: pass",
    "an event": "print('here', flush=True)\nthreading.Event().wait()",
    "a queue": "print('here', flush=True)\nqueue.Queue().get()",
    "a thread that waits": "t = threading.Thread(target=stay)\nt.start()\nt.join()",
    "a future of a thread that waits": "concurrent.futures.ThreadPoolExecutor().submit(stay).result()",
    "a pool of threads": "multiprocessing.pool.ThreadPool(2).map(lambda _: stay(), [1])",
    "a lock beside an idle pool": "concurrent.futures.ThreadPoolExecutor().submit(int).result()\nstay()",
    "a lock beside a connection to itself": "pair = connect()\nstay()",
}
"""Waits that only another thread or task can end."""
FOR_MORE = {
    "a time": "print('here', flush=True)\ntime.sleep(600)",
    "a lock for some time": "print('here', flush=True)\nlocked.acquire(timeout=600)",
    "an event for some time": "print('here', flush=True)\nthreading.Event().wait(600)",
    "a timer": "threading.Timer(600, locked.release).start()\nstay()",
    "a thread that sleeps": "run(lambda: time.sleep(600))\nstay()",
    "a thread that reads": "pair = connect()\nrun(lambda: pair[0].recv(1))\nstay()",
    "a thread that reads a pipe": "run(lambda: os.read(os.pipe()[0], 1))\nstay()",
    "a connection": "pair = connect()\nprint('here', flush=True)\npair[0].recv(1)",
    "a pipe": "r, w = os.pipe()\nprint('here', flush=True)\nos.read(r, 1)",
    "files": "print('here', flush=True)\nselect.select([server], [], [])",
    "a child": "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\nprint('here', flush=True)\nchild.wait()",
    "bytes on their way": "a, b = connect()\na.sendall(b'unread')\nstay()",
}
"""Waits that may end by themselves."""


@contextmanager
def running(folder: Path, source: str) -> Iterator[int]:
    """Runs a program until it prints a line; its pid."""
    program = folder / "program.py"
    program.write_text(BEGIN + source)
    with subprocess.Popen([sys.executable, str(program)], cwd=folder, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            yield process.pid
        finally:
            process.kill()


def read_stacks(folder: Path, pid: int) -> str:
    """What faulthandler has written of all threads of the process."""
    stacks = folder / "stacks"
    before = len(stacks.read_bytes())
    os.kill(pid, STACKS_SIGNAL)

    def read() -> str:
        text = stacks.read_bytes()[before:].decode()
        assert text.endswith("in <module>\n")  # the main thread is the last one
        return text

    return eventually(read)


def assert_waits(folder: Path, pid: int, found: set[int]) -> None:
    """Asserts it once the process does nothing any more."""

    def check() -> None:
        assert all(each.wait is not Wait.NOTHING for each in read_waits(pid).values())
        assert find_waiting({pid: read_stacks(folder, pid)}, ()) == found

    eventually(check)


@pytest.mark.parametrize("source", FOR_OTHERS.values(), ids=FOR_OTHERS)
def test_a_task_that_waits_for_threads_and_tasks_alone_is_found(tmp_path: Path, source: str) -> None:
    with running(tmp_path, source) as pid:
        assert_waits(tmp_path, pid, {pid})


@pytest.mark.parametrize("source", FOR_MORE.values(), ids=FOR_MORE)
def test_a_task_that_something_else_may_wake_is_not_found(tmp_path: Path, source: str) -> None:
    with running(tmp_path, source) as pid:
        assert_waits(tmp_path, pid, set())


def test_a_task_at_work_is_not_found(tmp_path: Path) -> None:
    with running(tmp_path, "print('here', flush=True)\nwhile True: pass") as pid:
        assert find_waiting({pid: read_stacks(tmp_path, pid)}, ()) == set()


def test_a_task_with_a_connection_to_another_program_is_not_found(tmp_path: Path) -> None:
    """An answer may arrive there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with running(tmp_path, f"kept = socket.create_connection(('127.0.0.1', {port}))\nstay()") as pid:
            assert_waits(tmp_path, pid, set())
            text = read_stacks(tmp_path, pid)
            assert find_waiting({pid: text}, {port}) == {pid}  # the port of another task
            server.accept()[0].close()
            assert_waits(tmp_path, pid, {pid})


def test_connected_tasks_of_one_machine_may_both_be_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = "print('here', flush=True)\nprint(server.getsockname()[1], file=open('port', 'w'), flush=True)\n"
    with running(tmp_path / "a", f"{first}kept = server.accept()\nlocked.acquire()") as server:

        def read_port() -> int:
            assert (tmp_path / "a" / "port").exists()
            text = (tmp_path / "a" / "port").read_text()
            assert text.endswith("\n")
            return int(text)

        connect = f"kept = socket.create_connection(('127.0.0.1', {eventually(read_port)}))\nstay()"
        with running(tmp_path / "b", connect) as client:

            def check() -> None:
                texts = {server: read_stacks(tmp_path / "a", server), client: read_stacks(tmp_path / "b", client)}
                assert find_waiting(texts, ()) == {server, client}
                assert find_waiting({client: texts[client]}, ()) == set()

            eventually(check)


def test_a_task_that_uses_a_device_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "kept = open('/dev/zero', 'rb')\nstay()") as pid:
        assert_waits(tmp_path, pid, {pid})
        monkeypatch.setattr(mutual_waits, "DEVICES", ("/dev/zero",))
        assert_waits(tmp_path, pid, set())


def test_no_task_is_found_if_the_kernel_or_the_program_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, "stay()") as pid:
        assert_waits(tmp_path, pid, {pid})
        text = read_stacks(tmp_path, pid)
        assert find_waiting({pid: ""}, ()) == set()
        assert find_waiting({pid: text.replace("program.py", "gone.py")}, ()) == set()
        monkeypatch.setattr(thread_waits, "_CALLS", {})
        assert find_waiting({pid: text}, ()) == set()
    assert find_waiting({pid: text}, ()) == set()


def test_a_library_that_waits_in_an_unknown_function_is_not_found(tmp_path: Path) -> None:
    """It may wait for anything: TensorFlow waits for up to a minute when it drops an iterator."""
    (tmp_path / "library.py").write_text(
        "def drop(lock):\n    take = lock.acquire\n    print('here', flush=True)\n    take()\n"
    )
    with running(tmp_path, "import library\nlibrary.drop(locked)") as pid:
        assert_waits(tmp_path, pid, set())


@pytest.mark.parametrize(
    ("local", "remote", "is_quiet", "outside"),
    [
        (2000, 40000, True, False),
        (40000, 2000, True, False),
        (40000, 443, True, True),
        (40000, 2000, False, True),
    ],
)
def test_a_connection_leads_outside_unless_it_is_to_a_task_and_silent(
    local: int, remote: int, is_quiet: bool, outside: bool
) -> None:
    known = {7: Connection((b"0100000A", local), (b"0200000A", remote), is_quiet)}
    assert leads_outside({7, 8}, {7, 8}, known, {2000, 2001}) is outside
