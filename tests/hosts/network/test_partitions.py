"""Machines that are cut off from each other or vanish during a run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts.namespaces import Network, needs_namespaces, running_network
from tests.harness.places import PROGRAMS
from tests.harness.processes.background import BackgroundRun
from tests.harness.processes.commands import distlaunch_command
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import await_none_left, make_mark, marked, wait_until

COVERS = ("launcher/gang", "launcher/transports", "worker_entry/system")

pytestmark = needs_namespaces


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Two hosts; a test may destroy one."""
    folder = tmp_path / "network"
    folder.mkdir()
    with running_network(folder) as made:
        yield made


class Run(BackgroundRun):
    """A `distlaunch up` on the controller."""

    def __init__(self, network: Network, folder: Path, rest: str) -> None:
        self.mark = make_mark()
        self.network = network
        spec = network.write_spec(f"{rest}env_from: [{next(iter(self.mark))}]\n")
        super().__init__(folder, "up", [spec], lambda argv, stderr: network.popen(argv, env=self.mark, stderr=stderr))

    def left_on(self, host: str) -> int:
        """Processes of the run's tasks on a host."""
        namespace = os.stat(f"/proc/{self.network.hosts[host].daemon.pid}/ns/net").st_ino
        return sum(_namespace(process.pid) == namespace for process in marked(self.mark))


def _namespace(pid: int) -> int | None:
    """A process's network namespace; None once the process is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return None


@pytest.mark.tensorflow
def test_training_continues_after_a_node_was_cut_off_for_20_s(network: Network, tmp_path: Path) -> None:
    run = Run(network, tmp_path, "program: {module: worker_entry.demo.train, args: [--epochs, 10]}\n")
    host = network.hosts["gpu-b"]
    run.wait_for(b"Epoch 3/10", 0)
    host.down()
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 20, "20 s have gone by")
    host.up()
    assert run.end() == 0, run.said
    assert "node gpu-b: no data for 10 s; its tasks continue" in run.said
    assert "node gpu-b: reconnected after 2" in run.said
    assert "0 processes left on 2 nodes" in run.said
    accuracies = [re.findall(rb"validation accuracy (0\.\d+)", run.log(worker)) for worker in range(2)]
    assert accuracies[0] == accuracies[1] != []
    for worker, name in enumerate(network.hosts):
        files = network.hosts[name].node_files(run.report["run_id"])
        assert_same_bytes(run.log(worker), (files / "attempt-1" / f"worker-{worker}.log").read_bytes())


TREE = "spawn_tree.py"


@pytest.fixture
def tree(network: Network) -> str:
    """The path of the program, which the hosts can also read."""
    shutil.copy(PROGRAMS / TREE, network.folder)
    return str(network.folder / TREE)


def test_a_node_cut_off_beyond_its_lease_is_lost_and_stops_its_tasks(
    network: Network, tmp_path: Path, tree: str
) -> None:
    run = Run(network, tmp_path, f"program: {{script: {tree}, args: [none, 2]}}\ntimeouts: {{lease_s: 5}}\n")
    run.wait_for(b"the tree stands")
    network.hosts["gpu-b"].down()
    assert run.end() == 3, run.said
    assert run.left_on("gpu-a") == 0  # at once
    assert "Error: node gpu-b was lost: no data for 2 s, and not reconnected within 5 s" in run.said
    assert "processes left on gpu-b: unknown" in run.said
    wait_until(lambda: run.left_on("gpu-b") == 0, "the lost node ends its tasks on its own", 15)
    network.hosts["gpu-b"].up()
    cleaned = network.run(distlaunch_command("clean", str(tmp_path / "run")))
    assert (cleaned.returncode, cleaned.stdout) == (
        0,
        "gpu-a: 0 processes stopped, 0 left\ngpu-b: 0 processes stopped, 0 left\n",
    )


def test_all_nodes_stop_their_tasks_after_the_lease_of_a_vanished_controller(
    network: Network, tmp_path: Path, tree: str
) -> None:
    """No FIN, no reset: the nodes receive nothing any more."""
    run = Run(network, tmp_path, f"program: {{script: {tree}, args: [none, 2]}}\ntimeouts: {{lease_s: 5}}\n")
    run.wait_for(b"the tree stands")
    for host in network.hosts.values():
        host.down()
    run.process.kill()
    run.process.communicate()
    await_none_left(run.mark)


def test_a_restart_waits_until_the_tasks_of_a_lost_node_have_ended(network: Network, tmp_path: Path) -> None:
    """Takes the lease and 10 s: the run has to wait until even an agent that hangs is killed."""
    claims = network.folder / "claims"
    claims.mkdir(mode=0o777)
    claims.chmod(0o777)
    shutil.copy(PROGRAMS / "claim.py", network.folder)
    rules = "restart: {max_restarts: 1, min_workers: 1}\ntimeouts: {lease_s: 5}\n"
    program = f"program: {{command: [{sys.executable}, {network.folder}/claim.py, {claims}]}}\n"
    run = Run(network, tmp_path, f"{program}{rules}")
    run.wait_for(b"claimed", 0)
    run.wait_for(b"claimed", 1)
    host = network.hosts["gpu-b"]
    there = os.stat(f"/proc/{host.daemon.pid}/ns/net").st_ino
    (task,) = [
        each for each in marked(run.mark) if "claim.py" in " ".join(each.cmdline()) and _namespace(each.pid) == there
    ]
    agent = task.parent()
    assert agent is not None
    agent.suspend()
    host.down()
    assert run.end() == 0, run.said
    (lost,), (again,) = claims.glob("1-worker:1-*"), claims.glob("2-*")
    assert lost.stat().st_mtime < again.stat().st_mtime, run.said
    assert "Tasks may still run on gpu-b; waiting " in run.said
    wait_until(lambda: run.left_on("gpu-b") == 0, "nothing is left there", 20)
