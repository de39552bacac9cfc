"""Clusters whose tasks run in their own networks: what is on the wire, who can connect, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.controller.actions import make_tunnel_key
from tests.harness.hosts.namespaces import Host, Network, needs_namespaces, running_network
from tests.harness.hosts.own_network import networks
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import Ran, distlaunch_command
from worker_entry.agent.network.tunnel_process import make_context

COVERS = ("worker_entry/agent/network", "launcher/controller/actions.py", "worker_entry/system")

pytestmark = needs_namespaces

WORD = "what-only-the-cluster-says" * 20
NODES = (
    f"- {{host: gpu-a, python: {sys.executable}, tasks: {{worker: 2}}}}\n"
    f"- {{host: gpu-b, python: {sys.executable}, tasks: {{worker: 1}}}}\n"
)
SNIFF = """\
import socket, sys, select
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("listening", flush=True)
word, found, seen, last = sys.argv[1].encode(), 0, 0, b""
while not select.select([sys.stdin], [], [], 0)[0]:
    if select.select([wire], [], [], 0.01)[0]:
        packet = wire.recv(1 << 17)
        seen, found = seen + 1, found + (word in packet)
print(found, seen)
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two nodes on which an unprivileged user logs in, and a host outside of the cluster."""
    with running_network(tmp_path_factory.mktemp("network"), count=3, user="trainer") as network:
        shutil.copy(PROGRAMS / "meet.py", network.folder)  # all hosts see this folder, and the user may read it
        yield network


def command_of(network: Network, directory: Path, settings: str, *, nodes: str = NODES) -> list[str]:
    """`distlaunch up` with these settings; without a program, the tasks meet."""
    spec = network.folder / f"{directory.parent.name}.yaml"
    if "program:" not in settings:
        settings += f"\nprogram: {{script: {network.folder}/meet.py, args: [{WORD}, '1']}}"
    spec.write_text(f"working_directory: '~'\n{settings}\nnodes:\n{nodes}")
    return distlaunch_command("up", "--run-dir", str(directory), str(spec))


def up(network: Network, directory: Path, settings: str, *, nodes: str = NODES) -> Ran:
    done = network.run(command_of(network, directory, settings, nodes=nodes), timeout=200)
    return Ran(done.returncode, done.stdout, done.stderr, directory)


@contextlib.contextmanager
def sniffing(host: Host, word: str, found: list[int]) -> Iterator[None]:
    """Counts packets with the word and all packets that pass this host; `found` has both counts at the end."""
    with host.watching("listening", SNIFF, word) as words:
        yield
    found.extend(map(int, words[0].split()))


@pytest.mark.parametrize("isolation", ["none", "tunnel"])
def test_cluster_traffic_is_readable_on_the_wire_only_without_a_tunnel(
    network: Network, tmp_path: Path, isolation: str
) -> None:
    machines = [Path(f"/proc/{host.daemon.pid}/ns/uts").readlink() for host in network.hosts.values()]
    before, found = networks(machines), list[int]()
    ports = 23700 + 10 * (isolation == "none")
    with sniffing(network.hosts["gpu-b"], WORD[:40], found):
        ran = up(network, tmp_path / "run", f"isolation: {isolation}\nports: {ports}-{ports + 9}")
    assert ran.status == 0, ran.stderr
    words, packets = found
    assert packets > 100
    assert words > 10 if isolation == "none" else words == 0
    assert "0 processes left" in ran.stderr
    assert networks(machines) == before
    hosts = "127.1.0.1 127.1.0.2" if isolation == "tunnel" else "10.77"
    assert f"met 2 at {hosts}" in ran.stdout


def test_a_tunnel_rejects_callers_without_a_certificate_even_on_a_cluster_node(
    network: Network, tmp_path: Path
) -> None:
    """The address of the node may reach the port; the address of an unknown peer may not."""
    settings = f"isolation: tunnel\nports: 23720-23729\nprogram: {{script: {network.folder}/meet.py, args: [x, '6']}}"
    node, target = network.hosts["gpu-a"], network.hosts["gpu-b"].address
    heard: dict[str, object] = {}
    with network.popen(command_of(network, tmp_path / "run", settings)) as process:
        assert process.stdout is not None
        wait_for_forming(tmp_path / "run")
        for name, host in (("node", node), ("stranger", network.hosts["gpu-c"])):
            heard[name] = json.loads(host.run([sys.executable, "-c", KNOCK, target, "23720"]).stdout)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"met 2" in out
    assert heard == {"node": ["", ""], "stranger": ["reset", "reset"]}


KNOCK = """\
import json, socket, ssl, sys
def talk(wrap, word):
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as call, wrap(call) as stream:
            stream.sendall(word)
            return stream.recv(9).hex()
    except ConnectionResetError:
        return "reset"
    except ssl.SSLError as error:
        return error.reason
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
print(json.dumps([talk(lambda call: call, b"PRI * HTTP/2.0 and more"), talk(context.wrap_socket, b"x")]))
"""


@pytest.mark.parametrize("same", [True, False], ids=["the certificate", "another certificate"])
def test_both_sides_of_a_tunnel_require_the_certificate_of_the_attempt(same: bool) -> None:
    one = make_tunnel_key()
    other = one if same else make_tunnel_key()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = make_context(ssl.PROTOCOL_TLS_SERVER, one.certificate, one.key)
    client = make_context(ssl.PROTOCOL_TLS_CLIENT, other.certificate, other.key)
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    refusals = set()
    for side in [*sides, *sides]:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            refusals.add(error.reason)
    if not same:
        assert "CERTIFICATE_VERIFY_FAILED" in refusals
        return
    assert refusals == set()
    sides[0].write(b"word")
    assert sides[1].read() == b"word"
    assert sides[1].version() == "TLSv1.3"


def wait_for_forming(directory: Path) -> None:
    """Waits until all tasks of the run listen."""

    def listening() -> None:
        journal = directory / "events.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        assert sum('"task-listening"' in line for line in lines) == 3

    eventually(listening)


@pytest.mark.parametrize("victim", ["task", "tunnel"])
def test_a_killed_task_is_restarted_and_a_killed_tunnel_ends_the_run(
    network: Network, tmp_path: Path, victim: str
) -> None:
    nodes = NODES.replace("tasks:", "port: 23740, tasks:")
    program = f"program: {{script: {network.folder}/meet.py, args: [x, '3']}}"
    settings = f"isolation: tunnel\nrestart: {{max_restarts: 1}}\n{program}"
    with network.popen(command_of(network, tmp_path / "run", settings, nodes=nodes), stderr=subprocess.PIPE) as process:
        wait_for_forming(tmp_path / "run")
        [tunnel] = pids_on(network.hosts["gpu-b"], b"tunnel")
        events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        tasks = {event["task"]: event["pid"] for event in events if event["event"] == "task-started"}
        os.kill(tasks["worker:2"] if victim == "task" else tunnel, signal.SIGKILL)
        out, err = process.communicate(timeout=100)
    assert b"0 processes left" in err
    if victim == "task":
        assert process.returncode == 0, err
        assert out.count(b"met 2") == 3
    else:
        assert process.returncode == 3, err
        assert b"[no-tunnel]" in err


def pids_on(host: Host, verb: bytes) -> list[int]:
    """The agent's processes of this kind on this host."""
    machine, found = Path(f"/proc/{host.daemon.pid}/ns/uts").readlink(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[-2:-1] == [verb] and (process / "ns/uts").readlink() == machine:
                found.append(int(process.name))
    return found


@pytest.mark.tensorflow
@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "parameter_server"])
def test_a_cluster_trains_through_a_tunnel(network: Network, tmp_path: Path, strategy: str) -> None:
    nodes = NODES if strategy == "multi_worker_mirrored" else NODES.replace("{worker: 2}", "{chief: 1, ps: 1}")
    program = "program: {module: worker_entry.demo.train, args: [--epochs, '2']}"
    ran = up(network, tmp_path / "run", f"strategy: {strategy}\nisolation: tunnel\n{program}", nodes=nodes)
    assert ran.status == 0, ran.stderr
    assert "0 processes left" in ran.stderr
