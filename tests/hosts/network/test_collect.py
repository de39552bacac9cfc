"""`collect` on machines without a shared disk: a spare node gets the checkpoint of a lost chief."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts.namespaces import CAN_RUN, Network, needs_namespaces, running_network
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import wait_until

COVERS = (
    "launcher/controller/collect/collector.py",
    "launcher/controller/collect/fetch.py",
    "worker_entry/agent/files/copy.py",
    "worker_entry/agent/files/source.py",
)

pytestmark = needs_namespaces


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three hosts, each with its own disk at the same path."""
    if not CAN_RUN:
        pytest.skip("needs namespaces")
    with running_network(tmp_path_factory.mktemp("network"), count=3) as started:
        (started.folder / "disk").mkdir()
        for host in started.hosts.values():
            host.run(["mount", "-t", "tmpfs", "none", str(started.folder / "disk")])
        yield started


def write_spec(network: Network, rest: str) -> str:
    disk = network.folder / "disk"
    spec = network.write_spec(
        f"checkpoint_directory: {disk}/checkpoints\nsync: {{path: project, to: {disk}/project}}\n"
        f"restart: {{max_restarts: 1, pause_s: 0.1}}\ntimeouts: {{lease_s: 5}}\n{rest}"
    )
    text = Path(spec).read_text()
    Path(spec).write_text(text.replace("host: 'gpu-c',", "host: 'gpu-c', spare: true,"))
    return spec


@pytest.mark.tensorflow
def test_a_spare_node_resumes_training_from_the_checkpoint_of_a_lost_chief(network: Network) -> None:
    project, run = network.folder / "project", network.folder / "run"
    project.mkdir()
    shutil.copy(PROGRAMS / "timed_keras.py", project / "train.py")
    spec = write_spec(network, "program: {script: train.py, args: [6, 3]}\ncollect: ['*.keras']\n")
    process = network.popen(distlaunch_command("up", "--run-dir", str(run), spec), stderr=subprocess.PIPE)
    backup = run / "checkpoints" / "backup" / "training_metadata.json"
    try:
        wait_until(lambda: backup.exists() or process.poll() is not None, "a checkpoint has come")
        assert process.poll() is None
        network.hosts["gpu-a"].destroy()
        said = process.communicate(timeout=120)[1].decode()
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "gpu-c takes the place of gpu-a" in said
    report = json.loads((run / "report.json").read_text())
    first, last = report["attempts"]
    assert first["verdict"]["reference"] == "node-lost"
    assert [task["node"] for task in last["tasks"]] == ["gpu-c", "gpu-b"]
    for number in range(2):
        log = (run / "attempt-2" / f"worker-{number}.log").read_text()
        steps = [int(step) for step in re.findall(r"^step (\d+) ", log, re.MULTILINE)]
        assert steps[0] > 20, said
        assert steps[-1] == 120
