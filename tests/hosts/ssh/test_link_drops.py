"""A connection that breaks during a run: the tasks continue, and no part of their logs is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.hosts.sshd import Hosts, running_hosts, send_to_sessions, sessions, skip_without_openssh
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import distlaunch_command
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import assert_none_left, make_mark, marked, wait_until
from worker_entry.agent.cleanup import find_agents

COVERS = (
    "launcher/transports",
    "worker_entry/agent/connection/connection.py",
    "worker_entry/agent/connection/evidence.py",
    "worker_entry/agent/connection/reattach_folder.py",
    "worker_entry/agent/connection/handover.py",
    "launcher/controller/links.py",
)

COUNT = str(PROGRAMS / "count.py")
TREE = str(PROGRAMS / "spawn_tree.py")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    with running_hosts(tmp_path_factory.mktemp("ssh")) as started:
        started.trust()
        yield started


class Run:
    """A `distlaunch up` in the background."""

    def __init__(self, hosts: Hosts, folder: Path, rest: str) -> None:
        self.mark = make_mark()
        self.hosts = hosts
        self._directory = folder / "run"
        self._stderr = folder / "stderr"
        rest += f"env_from: [{next(iter(self.mark))}]\n"
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                distlaunch_command("up", "--run-dir", str(self._directory), hosts.write_spec(rest)),
                cwd=folder,
                env={**os.environ, **hosts.env, **self.mark},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None:  # the test has failed: do not wait for the run's own end
            self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    @property
    def id(self) -> str:
        run_id: str = json.loads((self._directory / "run.json").read_text())["run_id"]
        return run_id

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self._directory / "report.json").read_text())
        return loaded

    def log(self, worker: int) -> bytes:
        path = self._directory / "attempt-1" / f"worker-{worker}.log"
        return path.read_bytes() if path.exists() else b""

    def log_there(self, worker: int) -> bytes:
        """The node's own log."""
        return (self.hosts.node_files(self.report["run_id"]) / "attempt-1" / f"worker-{worker}.log").read_bytes()

    def wait_for(self, text: bytes) -> None:
        wait_until(lambda: all(text in self.log(worker) for worker in range(2)), f"both logs have {text!r}")

    def wait_until_said(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.said.count(text) >= times, f"{text!r} is said {times} times")


def test_logs_are_complete_after_repeatedly_broken_connections(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, f"program: {{script: {COUNT}, args: [8]}}\n")
    with run:
        for round_ in range(3):
            run.wait_for(b"line %d " % (round_ * 700 + 100))
            send_to_sessions(signal.SIGKILL)
            run.wait_until_said("reconnected after", times=2 * (round_ + 1))
        assert run.process.wait(timeout=60) == 0, run.said
    for worker in range(2):
        lines = run.log(worker).splitlines()
        assert [line.split()[1] for line in lines[:-1]] == [b"%d" % number for number in range(len(lines) - 1)]
        assert lines[-1] == b"the last line"
        assert_same_bytes(run.log(worker), run.log_there(worker))
    assert "0 processes left on 2 nodes" in run.said
    assert run.said.count("the connection broke; its tasks continue") == 6
    assert_none_left(run.mark)


def test_agents_with_removed_folders_are_found_after_a_broken_connection(hosts: Hosts, tmp_path: Path) -> None:
    """For example by logind's RemoveIPC or a Slurm epilog, while the connections break."""
    run = Run(hosts, tmp_path, f"program: {{script: {COUNT}, args: [8]}}\nrestart: {{max_restarts: 3}}\n")
    with run:
        run.wait_for(b"line 100 ")
        folders = find_agents([run.id])
        assert len(folders) == 2
        for folder in folders:
            shutil.rmtree(folder)
        send_to_sessions(signal.SIGKILL)
        run.wait_until_said("reconnected after", times=2)
        assert run.process.wait(timeout=60) == 0, run.said
    assert len(run.report["attempts"]) == 1
    for worker in range(2):
        lines = run.log(worker).splitlines()
        assert [line.split()[1] for line in lines[:-1]] == [b"%d" % number for number in range(len(lines) - 1)]
    assert_none_left(run.mark)


@pytest.mark.smoke
def test_exits_during_a_lost_connection_are_reported_after_the_reconnect(hosts: Hosts, tmp_path: Path) -> None:
    """The last megabytes of the logs, the exits and the ends of the process trees occur without a connection."""
    go = tmp_path / "go"
    script = f"echo waiting; until [ -e {go} ]; do sleep 0.05; done; head -c 5000000 /dev/urandom; exit 3"
    run = Run(hosts, tmp_path, f"program: {{command: [sh, -c, '{script}']}}\ntimeouts: {{lease_s: 8}}\n")
    with run:
        run.wait_for(b"waiting\n")
        send_to_sessions(signal.SIGSTOP)  # silence, as if a cable were pulled
        stopped = sessions()
        go.touch()
        wait_until(lambda: all(p.name() == "sshd" for p in stopped) and len(tasks(run)) == 0, "both tasks have ended")
        assert run.process.wait(timeout=60) == 1, run.said
        for process in stopped:
            process.kill()
    for worker in range(2):
        assert len(run.log(worker)) == 5_000_008
        assert_same_bytes(run.log(worker), run.log_there(worker))
    assert "no data for 4 s; its tasks continue" in run.said
    assert [task["exit_code"] for task in run.report["attempts"][0]["tasks"]] == [3, 3]
    assert "0 processes left on 2 nodes" in run.said


def tasks(run: Run) -> list[psutil.Process]:
    """The program's own processes that still run."""
    return [process for process in marked(run.mark) if command_of(process)[:2] == ["sh", "-c"]]


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
