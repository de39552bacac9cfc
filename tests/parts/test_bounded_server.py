"""Unauthenticated callers exhaust no server: their number is limited, each has one deadline, EMFILE is survived."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.registry import CollectorRegistry

from launcher import bounded_server
from launcher.bounded_server import BoundedServer
from launcher.exporters import metrics
from launcher.exporters.metrics import CLIENTS_OF_ADDRESS, MetricsServer
from launcher.rundir.control import AskStatus, ControlServer, ask
from launcher.spec.fields import Endpoint
from tests.harness.polling import eventually
from tests.harness.witness import wait_until
from worker_entry.system.callers import Callers

COVERS = (
    "launcher/bounded_server.py",
    "launcher/rundir/control.py",
    "launcher/exporters/metrics.py",
    "worker_entry/system/callers.py",
)

LIMIT, PER_ADDRESS = 6, 4


def pairs(count: int) -> list[socket.socket]:
    return [side for _ in range(count) for side in socket.socketpair()][:count]


def test_new_callers_replace_the_oldest_caller_of_the_busiest_address() -> None:
    callers = Callers(limit=4, per_address=3, within_s=10.0)
    first, second, third, other, fourth, last, another = pairs(7)
    assert [callers.add(each, "a", 0.0) for each in (first, second, third)] == [[], [], []]
    assert callers.add(other, "b", 0.0) == []
    assert callers.add(fourth, "a", 1.0) == [first]
    assert callers.add(last, "c", 1.0) == [second]
    callers.remove(third)
    assert callers.add(another, "d", 2.0) == []
    assert len(callers) == 4
    assert callers.take_overdue(10.0) == [other]
    assert callers.take_overdue(11.5) == [fourth, last]
    assert callers.take_all() == [another]
    assert another not in callers


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[BoundedServer, int]]]:
    """Makes servers that echo a line, and count its sender as authenticated."""
    monkeypatch.setattr(bounded_server, "TICK_S", 0.05)
    made: list[BoundedServer] = []

    def serve(caller: socket.socket, note_proven: Callable[[], None]) -> None:
        caller.settimeout(30)
        if word := caller.recv(10):
            note_proven()
            caller.sendall(word)
            caller.recv(10)

    def make(within_s: float = 30.0) -> tuple[BoundedServer, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        made.append(
            BoundedServer(listener, serve, name="test", limit=LIMIT, per_address=PER_ADDRESS, within_s=within_s)
        )
        return made[-1], port

    yield make
    for each in made:
        each.close()
    wait_until(lambda: not any(each.name.startswith("test") for each in threading.enumerate()), "the threads end")


def call(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10, (source, 0))


def is_open(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return caller.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_silent_callers_do_not_lock_out_other_callers(bounded: Callable[..., tuple[BoundedServer, int]]) -> None:
    _, port = bounded()
    silent = [call(port, f"127.0.0.{number}") for number in (2, 3) for _ in range(3 * PER_ADDRESS)]
    eventually(lambda: _assert_equal(sum(map(is_open, silent)), LIMIT))
    with call(port) as caller:
        caller.sendall(b"word")
        assert caller.recv(10) == b"word"
    for each in silent:
        each.close()


def _assert_equal(found: int, expected: int) -> None:
    assert found == expected


def test_an_authenticated_caller_is_not_disconnected(bounded: Callable[..., tuple[BoundedServer, int]]) -> None:
    _, port = bounded(within_s=0.3)
    with call(port) as proven, call(port) as silent:
        proven.sendall(b"word")
        assert proven.recv(10) == b"word"
        eventually(lambda: _assert_equal(is_open(silent), False))
        rest = [call(port) for _ in range(4 * LIMIT)]
        assert is_open(proven)
        for each in rest:
            each.close()


def test_a_bounded_server_survives_running_out_of_file_descriptors(
    bounded: Callable[..., tuple[BoundedServer, int]],
) -> None:
    _, port = bounded()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    caller = socket.socket()
    with socket.socket() as last, call(port) as warm:
        warm.sendall(b"word")
        assert warm.recv(10) == b"word"
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(last.fileno(), caller.fileno()) + 1, limits[1]))
        try:
            fill = _fill()
            caller.settimeout(10)
            caller.connect(("127.0.0.1", port))
            assert caller.recv(10) == b""  # it is closed, and does not stay in the queue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in fill:
                os.close(descriptor)
    with call(port) as again:
        again.sendall(b"word")
        assert again.recv(10) == b"word"
    caller.close()


def _fill() -> list[int]:
    """Takes all descriptors that are left."""
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


def test_a_closed_server_drops_waiting_callers(bounded: Callable[..., tuple[BoundedServer, int]]) -> None:
    server, port = bounded()
    with call(port) as waiting:
        server.close()
        wait_until(lambda: not is_open(waiting), "the connection ends")
    wait_until(lambda: not listens(port), "it does not listen any more")


def listens(port: int) -> bool:
    try:
        call(port).close()
    except ConnectionRefusedError:
        return False
    return True


# --- the controller's servers ---


def test_slow_metrics_clients_use_few_descriptors_and_block_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "make_registry", lambda _: CollectorRegistry())
    server = MetricsServer(Endpoint("127.0.0.1", _free_port()))
    server.begin(lambda: pytest.fail("no status is needed"))
    before = len(os.listdir("/proc/self/fd"))
    slow = [call(server.port) for _ in range(100)]
    for each in slow:
        with contextlib.suppress(OSError):
            each.sendall(b"GET /metrics HTTP/1.1\r\n")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
        assert answer.status == 200
    eventually(lambda: _assert_at_most(len(os.listdir("/proc/self/fd")) - before - len(slow), CLIENTS_OF_ADDRESS + 1))
    for each in slow:
        each.close()
    server.close()


def _assert_at_most(found: int, most: int) -> None:
    assert found <= most


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_removed_control_socket_is_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_server, "TICK_S", 0.05)
    server = ControlServer()
    server.serve(lambda request: repr(request).encode())
    path = Path(server.path)
    for with_folder in (False, True):
        if with_folder:
            shutil.rmtree(_move(path))
        else:
            path.unlink()
        wait_until(path.exists, "the socket is there again")
        body, connection = ask(str(path), os.getpid(), AskStatus(), 10)
        assert body == b"AskStatus()"
        assert path.stat().st_mode & 0o777 == 0o600
        connection.close()
    server.close()
    time.sleep(0.2)
    assert not path.exists()


def _move(path: Path) -> Path:
    """Removes the socket, as if with its folder: other tests have sockets there."""
    other = path.with_name("moved-away")
    other.mkdir()
    path.rename(other / "socket")
    return other
