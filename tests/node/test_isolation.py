"""Tasks in a private network: no port can be reached from outside, and the network disappears afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.harness.apart import apart_on_linux, linux
from tests.harness.hosts import loopback
from tests.harness.hosts.own_network import networks
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.agent.network.relay import Relay
from worker_entry.protocol.values import Program, TaskRequest
from worker_entry.system.isolation import enter_own_network
from worker_entry.system.network import own_addresses
from worker_entry.system.ports import HeldPorts

COVERS = ("worker_entry/agent/network", "worker_entry/system")

pytestmark = linux

SERVE = """\
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
addresses = config["cluster"]["worker"]
me, folder = config["task"]["index"], pathlib.Path(sys.argv[1])
port = int(addresses[me].rpartition(":")[2])
server = socket.create_server(("", port), family=socket.AF_INET6, reuse_port=True, dualstack_ipv6=True)
host, _, other = addresses[1 - me].rpartition(":")
while True:
    try:
        with socket.create_connection((host, int(other)), timeout=5) as call:
            break
    except OSError:
        time.sleep(0.05)
(folder / f"port-{me}").write_text(f"{port} {os.readlink('/proc/self/ns/net')}")
while not (folder / "end").exists():
    time.sleep(0.05)
"""


def reaches(port: int) -> bool:
    addresses = [str(address) for address in own_addresses() if not address.is_link_local]
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["not isolated", "isolated"])
def test_a_port_can_be_reached_from_the_machine_only_without_isolation(
    distlaunch: Distlaunch, tmp_path: Path, isolated: bool
) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    seen: list[bool] = []
    inside: list[str] = []

    def look() -> None:
        try:
            texts = [eventually(lambda n=n: read(tmp_path / f"port-{n}"), 60).split() for n in range(2)]  # type: ignore[misc]
            seen.extend(reaches(int(port)) for port, _ in texts)
            inside.extend(network for _, network in texts)
        finally:
            (tmp_path / "end").touch()

    def read(path: Path) -> str:
        assert path.exists()
        text = path.read_text()
        assert text
        return text

    looking = threading.Thread(target=look)
    looking.start()
    ports = loopback.ports()  # no other run uses them
    options = ["--set", f"ports={ports[0]}-{ports[-1]}", *(["--set", "isolation=namespace"] if isolated else [])]
    ran = distlaunch("local", "--workers", "2", *options, "serve.py", str(tmp_path))
    looking.join()
    assert ran.status == 0, ran.stderr
    assert "0 processes left on this machine" in ran.stderr
    assert seen == [not isolated] * 2
    [network] = {*inside}
    assert (network in networks()) == (not isolated)


@pytest.mark.skipif(
    os.geteuid() == 0 and not all(folder.stat().st_mode & 0o001 for folder in Path(os.__file__).resolve().parents),
    reason="another user cannot reach the files of this Python",
)
@apart_on_linux
def test_an_unprivileged_user_gets_a_private_network_and_keeps_its_user_id() -> None:
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after the start of any program
    before = Path("/proc/self/ns/net").readlink()
    with socket.create_server(("127.0.0.1", 0)) as outside:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            enter_own_network()
            found = [os.geteuid() == user, {*map(str, own_addresses())} == {"127.0.0.1", "::1"}]
            found.append(Path("/proc/self/ns/net").readlink() != before)
            with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
                for host in ("127.0.0.1", "::1"):
                    socket.create_connection((host, server.getsockname()[1])).close()
            with socket.socket() as caller:
                found.append(caller.connect_ex(outside.getsockname()) != 0)
            os.write(writing, repr(found).encode())
            signal.pause()
        assert eventually(lambda: os.read(reading, 100)) == b"[True, True, True, True]"
        assert Path(f"/proc/{child}/environ").read_bytes() == Path("/proc/self/environ").read_bytes()  # same user
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_run_with_isolation_is_refused_without_network_namespaces(tmp_path: Path) -> None:
    limit = Path("/proc/sys/user/max_net_namespaces")
    # In the test's own user namespace, the limit applies only to that namespace.
    script = (
        f"echo 0 >{limit}; exec {sys.executable} -m launcher local --set isolation=namespace --run-dir {tmp_path}/run "
        f"-- touch {tmp_path}/started"
    )
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "[no-isolation]" in done.stderr
    assert not (tmp_path / "started").exists()


@apart_on_linux
def test_the_tensorboard_port_of_an_isolated_run_is_also_free_outside() -> None:
    first, *_ = loopback.ports()
    with socket.create_server(("127.0.0.1", first)):
        network = OuterNetwork()
        enter_own_network()
        held = HeldPorts()
        held.shown_network = network
        requests = [
            TaskRequest("worker:0", Program("command", "true"), 0),
            TaskRequest("tensorboard:0", Program("module", "tensorboard.main"), 0, reuse_address=True),
        ]
        assert held.hold(requests, first, first + 2) == []
        assert held.numbers == {"worker:0": first, "tensorboard:0": first + 1}
        held.release()
        network.end()


# --- the relay ---


@apart_on_linux
def test_the_relay_of_an_isolated_run_forwards_all_data_in_both_directions() -> None:
    selector = selectors.DefaultSelector()
    relay = Relay(selector)
    outer, inner = os.pipe()
    data = os.urandom(3 << 20)
    child = os.fork()
    if child == 0:  # outside
        os.close(inner)
        port = int(os.read(outer, 10))
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as call:
                sending = threading.Thread(target=lambda call=call: (call.sendall(data), call.shutdown(socket.SHUT_WR)))
                sending.start()
                heard = bytearray()
                while piece := call.recv(1 << 16):
                    heard += piece
                sending.join()
            if bytes(heard) != data:
                os._exit(1)
        os._exit(0)
    network = OuterNetwork()
    enter_own_network()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        relay.open(port, network)
        os.write(inner, str(port).encode())

        def echo() -> None:
            call, _ = server.accept()
            if os.fork() == 0:
                call.setblocking(True)
                while piece := call.recv(1 << 16):
                    call.sendall(piece)
                os._exit(0)
            call.close()

        selector.register(server, selectors.EVENT_READ, echo)
        ended: list[int] = []
        while child not in ended:
            for key, _ in selector.select(0.05):
                if key.fd in selector.get_map():
                    key.data()
            with contextlib.suppress(ChildProcessError):
                while (done := os.waitpid(-1, os.WNOHANG))[0]:
                    assert done[1] == 0
                    ended.append(done[0])
        relay.close()
        network.end()
        assert [*selector.get_map()] == [server.fileno()]
