"""64 nodes, each with its own connection and agent: they start together, and no process is left on any."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts.sshd import Hosts, make_addresses, make_hosts, running_sshd, sessions, skip_without_openssh
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = ("launcher/transports", "launcher/controller/links.py")

NODES = 64
AT_ONE_DAEMON = 16
"""The most addresses that an sshd listens on."""
MIB = 2**20


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """The nodes' daemons have the usual MaxStartups, which refuses some of so many connections at once."""
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    known = make_hosts(folder, make_addresses(names=(f"node-{number}" for number in range(NODES))))
    known.trust()
    addresses = list(known.addresses.values())
    with contextlib.ExitStack() as stack:
        for first in range(0, NODES, AT_ONE_DAEMON):
            stack.enter_context(running_sshd(known, *addresses[first : first + AT_ONE_DAEMON]))
        yield known


def test_64_nodes_start_together_and_no_process_is_left_on_any(hosts: Hosts, tmp_path: Path) -> None:
    """Takes long: 64 sessions of sshd and 64 agents, each with a Python, on the cores of one machine."""
    mark, go, run = make_mark(), tmp_path / "go", tmp_path / "run"
    script = f"echo waiting; until [ -e {go} ]; do sleep 1; done; echo $DISTLAUNCH_TASK has ended"
    rest = f"program: {{command: [sh, -c, '{script}']}}\nenv_from: [{next(iter(mark))}]\n"
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            distlaunch_command("up", "--run-dir", str(run), hosts.write_spec(rest)),
            cwd=tmp_path,
            env={**os.environ, **hosts.env, **mark},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    logs = [run / "attempt-1" / f"worker-{worker}.log" for worker in range(NODES)]
    try:
        wait_until(lambda: all(log.exists() and log.read_bytes() for log in logs), "all tasks have started")
        agents = [child for session in sessions() for child in session.children() if "python" in child.name()]
        memory = [agent.memory_full_info().uss for guardian in agents for agent in (guardian, *guardian.children()[:1])]
        status = Path(f"/proc/{process.pid}/status").read_text()
        go.touch()
        _, ended, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)
    finally:
        process.kill()
        process.wait()

    said = (tmp_path / "stderr").read_text()
    assert process.returncode == 0, said
    assert f"0 processes left on {NODES} nodes" in said
    report = json.loads((run / "report.json").read_text())
    assert len(report["attempts"][0]["tasks"]) == NODES
    for worker, log in enumerate(logs):
        assert log.read_text() == f"waiting\nworker:{worker} has ended\n"
    await_none_left(mark)
    wait_until(lambda: sessions() == [], "all sessions of the run are gone")

    cpu_s = usage.ru_utime + usage.ru_stime
    took = re.findall(r"Succeeded in ([\d.]+ s)", said)
    # Not ru_maxrss, because a child's begins with its parent's value.
    [peak_kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    peak_mib, each_mib = int(peak_kib) / 1024, sum(memory) / len(memory) / MIB
    print(f"{NODES} nodes: {took}; controller {peak_mib:.0f} MiB at the most, {cpu_s:.1f} s of CPU;")
    print(f"{len(memory)} agents and guardians, {each_mib:.1f} MiB of their own each")
    # Far above the usual peak, but one thread or buffer too many for each node would exceed it.
    assert peak_mib < 300
    assert len(memory) == 2 * NODES
    assert each_mib < 20
