"""Clusters whose tasks live in networks of their own: what is on the wire, who gets in, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, Ran, distlaunch_command
from tests.namespaces import Host, Network, running_network
from tests.own_network import networks
from tests.sshd import SSHD

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or not Path(SSHD).exists(),
        reason="network namespaces want root, iproute2 and OpenSSH's server",
    ),
]

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
    with running_network(tmp_path_factory.mktemp("network"), count=3) as network:
        yield network


def up(network: Network, directory: Path, settings: str, *, nodes: str = NODES) -> Ran:
    spec = network.folder / f"{directory.parent.name}.yaml"
    spec.write_text(f"{settings}\nnodes:\n{nodes}")
    command = distlaunch_command("up", "--run-dir", str(directory), str(spec))
    done = network.run(command, timeout=200)
    return Ran(done.returncode, done.stdout, done.stderr, directory)


@contextlib.contextmanager
def sniffing(host: Host, word: str, found: list[int]) -> Iterator[None]:
    """How many packets with the word, and how many at all, have passed this host; known at the end."""
    with subprocess.Popen(
        [*host.enter, sys.executable, "-c", SNIFF, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield
        finally:
            answer, _ = process.communicate(timeout=60)
        found.extend(map(int, answer.split()))


@pytest.mark.parametrize("isolation", ["none", "tunnel"])
def test_only_without_a_tunnel_is_anything_to_be_read_on_the_wire(
    network: Network, tmp_path: Path, isolation: str
) -> None:
    before, found = networks(), list[int]()
    program = f"program: {{script: {PROGRAMS / 'meet.py'}, args: [{WORD}, '1']}}"
    ports = 23700 + 10 * (isolation == "none")
    with sniffing(network.hosts["gpu-b"], WORD[:40], found):
        ran = up(network, tmp_path / "run", f"isolation: {isolation}\nports: {ports}-{ports + 9}\n{program}")
    assert ran.status == 0, ran.stderr
    words, packets = found
    assert packets > 100
    assert (words > 10) == (isolation == "none")
    assert (words == 0) == (isolation == "tunnel")
    assert "0 processes left" in ran.stderr
    assert networks() == before
    hosts = "127.1.0.1 127.1.0.2" if isolation == "tunnel" else "10.77"
    assert f"met 2 at {hosts}" in ran.stdout
