"""A lost node is replaced by a spare or used again when it returns; over real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.hosts.sshd import Hosts, make_addresses, make_hosts, running_sshd, sessions, skip_without_openssh
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, marked, wait_until

COVERS = (
    "launcher/gang",
    "launcher/controller/nodes.py",
)

NAMES = ("gpu-a", "gpu-b", "gpu-c")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    known = make_hosts(folder, make_addresses(names=NAMES))
    known.trust()
    with contextlib.ExitStack() as stack:
        for address in known.addresses.values():
            stack.enter_context(running_sshd(known, address))
        yield known


SCRIPT = (
    'echo "$DISTLAUNCH_TASK $DISTLAUNCH_ATTEMPT"; [ $DISTLAUNCH_ATTEMPT = 1 ] && exec sleep 600; '
    'echo "$TF_CONFIG"; sleep 1'
)


def run_and_lose_worker_1(hosts: Hosts, folder: Path, nodes: str, restart: str) -> tuple[int, str, dict[str, Any]]:
    """Kills the agent and the guardian of worker:1; returns the exit status, stderr, and the report."""
    mark = make_mark()
    spec = folder / "spec.yaml"
    spec.write_text(
        f"nodes:\n{nodes}restart: {restart}\nenv_from: [{next(iter(mark))}]\ntimeouts: {{lease_s: 5}}\n"
        f"program: {{command: [sh, -c, {json.dumps(SCRIPT)}]}}\n"
    )
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            distlaunch_command("up", "--run-dir", "run", str(spec)),
            cwd=folder,
            env={**os.environ, **hosts.env, **mark},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    with process:
        try:
            logs = [folder / "run" / "attempt-1" / f"worker-{number}.log" for number in range(2)]
            wait_until(lambda: all(log.exists() and log.read_bytes() for log in logs), "both tasks run")
            [victim] = [p for p in marked(mark) if p.environ().get("DISTLAUNCH_TASK") == "worker:1"]
            agent = victim.parent()
            assert agent is not None
            guardian = agent.parent()
            assert guardian is not None
            for doomed in (guardian, agent):
                doomed.suspend()
            for doomed in (guardian, agent):
                doomed.kill()
            status = process.wait(timeout=90)
        finally:
            process.kill()
    await_none_left(mark)
    wait_until(lambda: not living_sessions(), "no session is left anywhere")
    return status, (folder / "stderr").read_text(), json.loads((folder / "run" / "report.json").read_text())


def living_sessions() -> list[psutil.Process]:
    return [session for session in sessions() if session.status() != psutil.STATUS_ZOMBIE]


def nodes_of(*lines: str) -> str:
    return "".join(f"  - {{python: {sys.executable}, {line}}}\n" for line in lines)


def test_a_spare_node_replaces_a_lost_node(hosts: Hosts, tmp_path: Path) -> None:
    nodes = nodes_of("host: gpu-a", "host: gpu-b", "host: gpu-c, spare: true")
    status, said, report = run_and_lose_worker_1(hosts, tmp_path, nodes, "{max_restarts: 1, pause_s: 0.1}")
    assert status == 0, said
    assert "Error: node gpu-b was lost: " in said
    assert "gpu-c takes the place of gpu-b" in said
    assert "0 processes left on 3 nodes" in said  # the lost node could be asked: its agent had ended
    first, last = report["attempts"]
    assert first["verdict"]["reference"] == "node-lost"
    assert [(task["task"], task["node"]) for task in last["tasks"]] == [("worker:0", "gpu-a"), ("worker:1", "gpu-c")]
    config = json.loads((tmp_path / "run" / "attempt-2" / "worker-1.log").read_text().splitlines()[1])
    hosts_dialled = [address.partition(":")[0] for address in config["cluster"]["worker"]]
    assert hosts_dialled == [hosts.addresses["gpu-a"], hosts.addresses["gpu-c"]]


def test_a_lost_node_that_returns_is_used_again(hosts: Hosts, tmp_path: Path) -> None:
    nodes = nodes_of("host: gpu-a", "host: gpu-b")
    status, said, report = run_and_lose_worker_1(hosts, tmp_path, nodes, "{max_restarts: 1, pause_s: 0.1}")
    assert status == 0, said
    assert "No spare node is left; waiting up to 300 s for gpu-b to come back\ngpu-b: back after " in said
    assert [task["node"] for task in report["attempts"][1]["tasks"]] == ["gpu-a", "gpu-b"]
    assert "0 processes left on 2 nodes" in said
