"""Connecting to many nodes at once and starting their agents, against clients that only run `true` there.

Every node is an sshd of its own on this machine, so nodes and client share its cores: beside the wall time, the table
shows the CPU time of a node's session and that of the client alone. The rivals are asyncssh and parallel-ssh, taken
from the interpreter that DISTLAUNCH_RIVALS names (default: this one), pdsh and clush; those that are missing are left
out. All clients use the same user key and exchange keys by curve25519; parallel-ssh checks no host key. Only
ours, pdsh and clush look into the user's ssh configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.hosts.sshd import QUIET, Hosts, make_hosts, running_sshd
from tests.harness.witness import wait_until

COUNTS = (1, 16, 64, 200)
PORT = 22122
STARTING_AT_ONCE = 8
RIVALS = os.environ.get("DISTLAUNCH_RIVALS", sys.executable)

ASYNCSSH = """
import asyncio, getpass, json, sys, time
import asyncssh

async def main(folder, port, hosts):
    options = asyncssh.SSHClientConnectionOptions(
        config=None, username=getpass.getuser(), client_keys=[folder + "/user_key"], agent_path=None,
        known_hosts=asyncssh.read_known_hosts(folder + "/known_hosts"),
        kex_algs=["curve25519-sha256"], encryption_algs=["aes128-gcm@openssh.com"],
    )
    limit = asyncio.Semaphore(64)

    async def run(host):
        async with limit, asyncssh.connect(host, port, options=options) as connection:
            await connection.run("true", check=True)

    await asyncio.gather(*map(run, hosts))

started = time.perf_counter()
asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
print(json.dumps({"end_s": time.perf_counter() - started}))
"""
PARALLEL_SSH = """
import getpass, json, sys, time
from pssh.clients import ParallelSSHClient

folder, port, *hosts = sys.argv[1:]
started = time.perf_counter()
client = ParallelSSHClient(
    hosts, user=getpass.getuser(), port=int(port), pkey=folder + "/user_key", pool_size=len(hosts), allow_agent=False
)
output = client.run_command("true")
client.join(output)
assert [host.exit_code for host in output] == [0] * len(hosts)
print(json.dumps({"end_s": time.perf_counter() - started}))
"""


@dataclass(frozen=True)
class Client:
    """One side of the comparison. The hosts follow `argv`: as one word each, or all as one word if `joins` is true."""

    name: str
    argv: Sequence[str]
    joins: bool = False

    def command(self, hosts: Sequence[str]) -> list[str]:
        return [*self.argv, *([",".join(hosts), "true"] if self.joins else hosts)]


@dataclass(frozen=True)
class Cost:
    """What one command costs: its wall time, CPU time with its children, and CPU time of the nodes' sessions.

    `said` holds the times that the client itself measured, counted from the end of its imports.
    """

    wall_s: float
    client_s: float
    nodes_s: float
    said: Mapping[str, float]


def measure(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder, _running_nodes(Path(folder)) as hosts:
        clients = list(_clients(hosts, _make_python(Path(folder))))
        print("connect to N nodes at once: wall, its ratio to the fastest rival's, CPU per node of client and node,")
        print("and times within the client: ssh configuration read, all agents up, end")
        for count in COUNTS:
            addresses = list(hosts.addresses.values())[:count]
            if count == COUNTS[0]:  # once, to fill the disk's cache
                for client in clients:
                    _run(client, addresses, hosts)
            costs: dict[str, list[Cost]] = {client.name: [] for client in clients}
            for _ in range(runs):
                for client in clients:
                    costs[client.name].append(_run(client, addresses, hosts))
            fastest = min(_wall(costs[client.name]) for client in clients if not client.name.startswith("ours"))
            for name, found in costs.items():
                _print(count, name, found, fastest)


def _make_python(folder: Path) -> str:
    """An interpreter that finds this one's packages, and starts without the hooks of a development environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "python")], check=True)
    [packages] = (folder / "python").glob("lib/*/site-packages")
    (packages / "all.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "python" / "bin" / "python")


def _clients(hosts: Hosts, python: str) -> Iterator[Client]:
    ours = [sys.executable, "-m", "tests.benchmarks.connect_all"]
    yield Client("ours", [*ours, "agent", python])
    yield Client("ours, no agent: `true`", [*ours, "true", python])
    place = [str(hosts.folder), str(hosts.port)]
    for name, package, program in (("asyncssh", "asyncssh", ASYNCSSH), ("parallel-ssh", "pssh", PARALLEL_SSH)):
        if subprocess.run([RIVALS, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0:
            yield Client(name, [RIVALS, "-c", program, *place])
        else:
            print(f"  {name} is not installed for {RIVALS}: left out")
    config = f"-F {hosts.folder}/config"
    for name, argv in (
        ("pdsh -f32", ["env", f"PDSH_SSH_ARGS_APPEND={config}", "pdsh", "-S", "-R", "ssh", "-f", "32", "-w"]),
        ("clush -f64", ["clush", "-S", "-f", "64", "-o", config, "-w"]),
    ):
        if shutil.which(name.partition(" ")[0]) is not None:
            yield Client(name, argv, joins=True)
        else:
            print(f"  {name} is not installed: left out")


@contextlib.contextmanager
def _running_nodes(folder: Path) -> Iterator[Hosts]:
    """Runs a daemon for each node of the largest count; `Hosts.env` makes `ssh` reach each by its address."""
    addresses = {f"127.0.1.{number + 1}": f"127.0.1.{number + 1}" for number in range(max(COUNTS))}
    hosts = make_hosts(folder, addresses, PORT)
    config = folder / "config"
    # Only what is the same for all hosts: every `ssh` of pdsh and clush reads this file.
    common = config.read_text().partition("Host *\n")[2]
    config.write_text(f"Host *\n{common}  KexAlgorithms curve25519-sha256\n  BatchMode yes\n")
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    hosts.trust()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max_workers=STARTING_AT_ONCE) as pool:
        list(pool.map(lambda address: stack.enter_context(running_sshd(hosts, address, options=QUIET)), addresses))
        yield hosts


def _run(client: Client, addresses: Sequence[str], hosts: Hosts) -> Cost:
    daemons = [process for process in psutil.Process().children() if process.name() == "sshd"]
    before = _sessions_cpu(daemons)
    started = time.perf_counter()
    process = subprocess.Popen(
        client.command(addresses),
        env={**os.environ, **hosts.env, "SSH_AUTH_SOCK": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # includes all children that the client waited for
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 0, client.name
    wait_until(lambda: not any(daemon.children() for daemon in daemons), "all sessions have ended")
    said = json.loads(output) if output.startswith(b"{") else {}
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, _sessions_cpu(daemons) - before, said)


def _sessions_cpu(daemons: Sequence[psutil.Process]) -> float:
    times = [daemon.cpu_times() for daemon in daemons]
    return float(sum(each.children_user + each.children_system for each in times))


def _wall(costs: Sequence[Cost]) -> float:
    return statistics.median(cost.wall_s for cost in costs)


def _print(count: int, name: str, costs: Sequence[Cost], fastest_s: float) -> None:
    walls = [cost.wall_s for cost in costs]
    client_ms = 1000 * statistics.median(cost.client_s for cost in costs) / count
    node_ms = 1000 * statistics.median(cost.nodes_s for cost in costs) / count
    said = {word: statistics.median(cost.said[word] for cost in costs) for word in costs[0].said}
    inside = ", ".join(f"{word.removesuffix('_s')} {seconds:.2f} s" for word, seconds in said.items())
    print(
        f"  {count:>3}  {name:<23} {_wall(costs):6.2f} ({min(walls):.2f} to {max(walls):.2f}) s   "
        f"ratio {_wall(costs) / fastest_s:5.2f}   client {client_ms:6.1f} ms   node {node_ms:6.1f} ms   {inside}",
        flush=True,
    )
