"""A machine outside the cluster scans its ports during training and gets no answer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts.namespaces import CONTROLLER, Host, Network, needs_namespaces, running_network
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Ran, distlaunch_command

COVERS = ("worker_entry/agent/port_guards.py", "launcher/gang/unknown_peers.py", "worker_entry/system")

pytestmark = [pytest.mark.tensorflow, needs_namespaces]

SHORT = ("-m", "worker_entry.demo.train", "--epochs", "2")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with running_network(tmp_path_factory.mktemp("network"), count=3) as network:
        yield network


@contextlib.contextmanager
def scanning(stranger: Host, target: str, first: int, last: int, found: dict[str, Any]) -> Iterator[None]:
    """The unknown peer scans these ports of the target; at the end, `found` has the results."""
    with stranger.watching("scanning", (PROGRAMS / "scan.py").read_text(), target, str(first), str(last)) as words:
        yield
    found.update(json.loads(words[0]))


def run(network: Network, directory: Path, *arguments: str) -> Ran:
    done = network.run(distlaunch_command(arguments[0], "--run-dir", str(directory), *arguments[1:]), timeout=200)
    return Ran(done.returncode, done.stdout, done.stderr, directory)


def refused(ran: Ran) -> set[tuple[str, str]]:
    """The tasks whose ports refused an unknown peer, with the peer's address."""
    lines = [json.loads(line) for line in (ran.directory / "events.jsonl").read_text().splitlines()]
    return {(line["task"], line["address"]) for line in lines if line["event"] == "connection-rejected"}


@pytest.mark.parametrize(
    ("host", "guard"), [(CONTROLLER[0], "off"), (CONTROLLER[0], "required"), (CONTROLLER[1], "required")]
)
def test_an_unknown_peer_reaches_a_local_run_only_without_port_guards(
    network: Network, tmp_path: Path, host: str, guard: str
) -> None:
    found: dict[str, Any] = {}
    first = 23600 + 20 * (guard == "off") + 10 * (":" in host)  # closing connections hold a port for a minute
    settings = ("--set", f"guard={guard}", "--set", f"ports={first}-{first + 1}")
    with scanning(network.hosts["gpu-c"], host, first, first + 1, found):
        ran = run(network, tmp_path / "run", "local", "--workers", "2", *settings, *SHORT)
    assert ran.status == 0, ran.stderr
    assert found["tries"] > 200
    if guard == "off":
        assert found["answered"] == [first, first + 1]
        return
    assert found["answered"] == []
    assert found["connected"] > 50
    stranger = network.hosts["gpu-c"]
    address = stranger.address6 if ":" in host else stranger.address
    assert refused(ran) == {("worker:0", address), ("worker:1", address)}
    assert [task["unguarded"] for task in ran.report["attempts"][0]["tasks"]] == [None, None]


@pytest.mark.parametrize("ipv6", [True, False], ids=["IPv6", "IPv4 only"])
def test_an_unknown_peer_does_not_reach_parameter_servers_on_two_machines(
    network: Network, tmp_path: Path, ipv6: bool
) -> None:
    if not ipv6:  # as in many pods: TensorFlow listens on IPv4 only; the hosts lose their IPv6 addresses for good
        for name in ("gpu-a", "gpu-b"):
            network.hosts[name].run(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"])
    first = 23660 if ipv6 else 23670
    spec = network.folder / "servers.yaml"
    spec.write_text(
        f"strategy: parameter_server\nguard: required\nports: {first}-{first + 1}\n"
        "program: {module: worker_entry.demo.train, args: [--epochs, '2']}\n"
        f"nodes:\n- {{host: gpu-a, python: {sys.executable}, tasks: {{chief: 1, ps: 1}}}}\n"
        f"- {{host: gpu-b, python: {sys.executable}, tasks: {{worker: 2}}}}\n"
    )
    found: dict[str, Any] = {}
    with scanning(network.hosts["gpu-c"], network.hosts["gpu-b"].address, first, first + 1, found):
        ran = run(network, tmp_path / "run", "up", str(spec))
    assert ran.status == 0, ran.stderr
    assert found["answered"] == []
    assert found["connected"] > 50
    stranger = network.hosts["gpu-c"].address
    assert refused(ran) == {("worker:0", stranger), ("worker:1", stranger)}
    assert {task["unguarded"] for task in ran.report["attempts"][0]["tasks"]} == {None}
