"""Held ports: other launchers and ordinary servers cannot bind them; the server of the task can."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.apart import apart_on_linux, linux
from tests.harness.hosts import loopback
from tests.harness.polling import eventually
from worker_entry.protocol.values import Program, TaskRequest
from worker_entry.system.ports import HeldPorts

_first_for_all = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
PRIVILEGED = int(_first_for_all.read_text()) if _first_for_all.exists() else 1024


def request(task: str, port: int = 0) -> TaskRequest:
    return TaskRequest(task, Program("command", "true"), port)


@contextmanager
def held(*requests: TaskRequest, first: int = 1, last: int = 1) -> Iterator[HeldPorts]:
    ports = HeldPorts()
    try:
        assert ports.hold(list(requests), first, last) == []
        yield ports
    finally:
        ports.release()


def start_server(port: int, *, reuse_port: bool = True) -> socket.socket:
    """Starts a server as gRPC does: with SO_REUSEADDR, and with SO_REUSEPORT under TF_GRPC_REUSE_PORT=true."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.fixture
def free() -> int:
    """The first of 20 unused ports in a row: each test has its own range."""

    def find() -> int:
        for first in loopback.ports()[::20]:
            ports = HeldPorts()
            problems = ports.hold([request(f"worker:{index}") for index in range(20)], first, first + 19)
            ports.release()
            if problems == []:
                return first
        raise AssertionError("no 20 free ports in a row")

    return eventually(find)  # connections of earlier tests keep some ports for a minute


# --- held ---


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "of a range"])
def test_a_held_port_cannot_be_held_twice(free: int, explicit: bool) -> None:
    wanted = request("worker:0", free if explicit else 0)
    with held(request("worker:0", free)):
        others = HeldPorts()
        [problem] = others.hold([wanted], free, free)
        assert problem.reference == ("port-taken" if explicit else "no-free-port")
        assert problem.task == "worker:0"
        assert others.numbers == {}


def test_a_server_without_so_reuseport_cannot_take_a_held_port(free: int) -> None:
    with held(request("worker:0", free)), pytest.raises(OSError, match="in use"):
        start_server(free, reuse_port=False)


def test_a_server_with_so_reuseport_can_bind_a_held_port_and_be_reached(free: int) -> None:
    with held(request("worker:0", free)), start_server(free) as server:
        with socket.create_connection(("127.0.0.1", free)) as client:
            accepted, _ = server.accept()
            accepted.sendall(b"hello")
            accepted.close()
            assert client.recv(10) == b"hello"


def test_every_connection_to_a_held_port_reaches_the_server_not_the_holder(free: int) -> None:
    """The holder gets no connection to an IPv4 server: it listens with an IPv6 socket on Linux, or not at all."""
    with held(request("worker:0", free)), start_server(free) as server:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", free), timeout=5):
                server.settimeout(5)
                server.accept()[0].close()


def test_release_frees_held_ports(free: int) -> None:
    ports = HeldPorts()
    for _ in range(3):
        assert ports.hold([request("worker:0"), request("worker:1", free + 3)], free, free) == []
        assert ports.numbers == {"worker:0": free, "worker:1": free + 3}
        ports.release()
        assert ports.numbers == {}
    start_server(free, reuse_port=False).close()
    start_server(free + 3, reuse_port=False).close()


def test_an_explicit_port_can_be_held_again_directly_after_its_server_ends(free: int) -> None:
    """The kernel keeps such connections for a minute; a second run must not wait for that."""
    with held(request("worker:0", free)), start_server(free) as server:
        client = socket.create_connection(("127.0.0.1", free))
        server.accept()[0].close()  # the side that closes first keeps the connection
        client.close()
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind(("", free))
    with held(request("worker:0", free)):
        [problem] = HeldPorts().hold([request("worker:0", free)], 1, 1)
        assert problem.reference == "port-taken"
        start_server(free).close()


# --- chosen ---


def test_ports_of_a_range_are_distinct_and_within_it(free: int) -> None:
    with held(*(request(f"worker:{index}") for index in range(20)), first=free, last=free + 19) as ports:
        assert sorted(ports.numbers.values()) == list(range(free, free + 20))


def test_occupied_ports_of_a_range_are_skipped(free: int) -> None:
    with start_server(free), held(request("worker:7", free + 1)):
        with held(request("worker:0"), first=free, last=free + 2) as ports:
            assert ports.numbers == {"worker:0": free + 2}


def test_an_explicit_port_within_the_range_is_not_assigned_to_another_task(free: int) -> None:
    with held(request("worker:0"), request("worker:1", free), first=free, last=free + 1) as ports:
        assert ports.numbers == {"worker:0": free + 1, "worker:1": free}


def test_a_too_small_port_range_is_reported_for_each_task_without_a_port(free: int) -> None:
    ports = HeldPorts()
    problems = ports.hold([request(f"worker:{index}") for index in range(5)], free, free + 2)
    ports.release()
    assert [(problem.reference, problem.task) for problem in problems] == [
        ("no-free-port", "worker:3"),
        ("no-free-port", "worker:4"),
    ]
    assert problems[0].message == f"no free port is left in {free}-{free + 2}"
    assert "ports:" in problems[0].hint


@linux
@pytest.mark.parametrize("reuse_port", [False, True], ids=["exclusive", "shared"])
def test_the_process_that_holds_an_explicit_port_is_named(free: int, reuse_port: bool) -> None:
    code = f"""if True:
        import ctypes, socket, sys
        ctypes.CDLL(None).prctl(15, b"squatter", 0, 0, 0)
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, {reuse_port})
        server.bind(("", {free}))
        server.listen()
        print("listens", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "listens\n"
        [problem] = HeldPorts().hold([request("worker:1", free)], 1, 1)
        squatter.communicate()
    assert problem.reference == "port-taken"
    assert problem.message == f"port {free} is held by pid {squatter.pid} (squatter)"
    assert problem.task == "worker:1"


@pytest.mark.skipif(PRIVILEGED < 2, reason="every user of this system may bind every port")
@apart_on_linux
def test_a_privileged_port_is_reported_to_an_unprivileged_user() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    [problem] = HeldPorts().hold([request("worker:0", 1)], 1, 1)
    assert problem.reference == "port-refused"
    assert problem.message == "port 1 cannot be bound: Permission denied"


def test_agents_that_race_for_a_port_range_never_share_a_port(free: int, tmp_path: Path) -> None:
    """Three processes choose 5 of 15 ports each at the same moment, and hold them; no port is held twice."""
    code = f"""if True:
        import json, os, sys, time
        from worker_entry.protocol.values import Program, TaskRequest
        from worker_entry.system.ports import HeldPorts
        print("ready", flush=True)
        while not os.path.exists({str(tmp_path / "go")!r}):
            pass
        ports = HeldPorts()
        requests = [TaskRequest(str(index), Program("command", "true")) for index in range(5)]
        assert ports.hold(requests, {free}, {free + 14}) == []
        print(json.dumps(list(ports.numbers.values())), flush=True)
        sys.stdin.read()
    """
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        (tmp_path / "go").touch()
        numbers = [number for racer in racers for number in json.loads(racer.stdout.readline())]  # type: ignore[union-attr]
        assert sorted(numbers) == list(range(free, free + 15))
    finally:
        for racer in racers:
            racer.communicate()
