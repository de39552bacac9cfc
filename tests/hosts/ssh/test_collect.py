"""Files that are collected over SSH arrive complete after broken connections."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.controller.collect.fetch import PIECE
from tests.harness.apart import linux
from tests.harness.hosts.sshd import running_hosts, send_to_sessions, skip_without_openssh
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import wait_until

COVERS = (
    "launcher/controller/collect/collector.py",
    "launcher/controller/collect/folder.py",
    "launcher/controller/collection_wait.py",
    "launcher/controller/collect/fetch.py",
    "launcher/commands/collect.py",
    "worker_entry/agent/files/source.py",
)


# --- over SSH ---


@linux
@pytest.mark.smoke
def test_collected_files_are_complete_after_several_broken_connections(tmp_path: Path) -> None:
    skip_without_openssh()
    ssh = tmp_path / "ssh"
    ssh.mkdir(mode=0o700)
    with running_hosts(ssh) as hosts:
        hosts.trust()
        size = 200 << 20
        program = f"head -c {size} /dev/urandom > big-$DISTLAUNCH_TASK; sha256sum big-$DISTLAUNCH_TASK"
        spec = hosts.write_spec(
            f"working_directory: {tmp_path}\ncollect: [big-*]\ntimeouts: {{lease_s: 20}}\n"
            f"program: {{command: [sh, -c, {json.dumps(program)}]}}\n"
        )
        parts, breaks = tmp_path / "run" / "collected" / ".parts", 0
        with (tmp_path / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                distlaunch_command("up", "--run-dir", "run", spec),
                cwd=tmp_path,
                env={**os.environ, **hosts.env},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

        def back() -> int:
            return (tmp_path / "stderr").read_text().count("reconnected after")

        with process:
            while process.poll() is None:
                if breaks < 3 and _size(parts) > breaks * size // 4 + PIECE:
                    breaks += 1
                    send_to_sessions(signal.SIGKILL)
                    wait_until(lambda at=2 * breaks: back() == at, "both are back", 60)  # type: ignore[misc]
                time.sleep(0.005)
    text = (tmp_path / "stderr").read_text()
    assert process.returncode == 0, text
    assert breaks == 3, text
    assert "not collected" not in text
    for number in range(2):
        log = (tmp_path / "run" / "attempt-1" / f"worker-{number}.log").read_text()
        [digest, name] = log.split()
        [copy] = (tmp_path / "run" / "collected").glob(f"gpu-*/{name}")
        told = subprocess.run(["sha256sum", str(copy)], capture_output=True, text=True, check=True)
        assert told.stdout.split()[0] == digest


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*")) if folder.exists() else 0
