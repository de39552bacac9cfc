"""A pipe or a file on distlaunch's stdin reaches the tasks on other machines completely."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.hosts.sshd import running_hosts
from tests.harness.processes.commands import distlaunch_command

COVERS = (
    "launcher/controller/task_input.py",
    "worker_entry/agent/tasks/input.py",
    "worker_entry/agent/tasks/task.py",
    "worker_entry/task/forkserver.py",
)


@pytest.mark.slow
def test_stdin_reaches_tasks_on_other_machines_completely(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    with running_hosts(tmp_path / "ssh") as hosts:
        hosts.trust()
        spec = hosts.write_spec("program: {command: [sha256sum]}\nstdin: all\n")
        data = os.urandom(3_000_000)
        command = distlaunch_command("up", "--no-check", "--run-dir", str(tmp_path / "run"), spec)
        env = {**os.environ, **hosts.env}
        done = subprocess.run(command, env=env, input=data, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = subprocess.run(["sha256sum"], input=data, capture_output=True, check=True).stdout.decode().strip()
    assert [line.partition(" │ ")[2] for line in done.stdout.decode().splitlines()] == [expected] * 2
