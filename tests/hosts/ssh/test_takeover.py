"""`resume`: a new controller takes over a run while it trains, or starts it again when no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts.sshd import Hosts, running_hosts, skip_without_openssh
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.resumed_runs import read_goodput, run_json
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = ("launcher/rundir", "launcher/sources", "launcher/controller", "launcher/commands")

TICKING = str(PROGRAMS / "ticking.py")
WORKERS = ("worker-0", "worker-1")


def states(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    return [line["state"] for line in lines if line["event"] == "state"]


def has_line(log: Path, number: int) -> bool:
    return log.exists() and f"\nline {number} ".encode() in log.read_bytes()


def check_log(log: bytes) -> None:
    """Checks that every line is there once, in order, up to the end that the program itself has counted."""
    *lines, end, rest = log.decode().split("\n")
    assert rest == ""
    assert lines == [f"line {number} {'x' * (number % 97)}" for number in range(1, len(lines) + 1)]
    assert end == f"end after {len(lines)}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts whose keys are known."""
    skip_without_openssh()
    folder = tmp_path_factory.mktemp("hosts") / "ssh"
    folder.mkdir(mode=0o700)
    with running_hosts(folder) as started:
        started.trust()
        yield started


class Ticking:
    """A run of two ticking workers on two hosts that a command names; it ends when `finish` is called."""

    def __init__(self, hosts: Hosts, folder: Path, rest: str = "") -> None:
        self.folder = folder / "run"
        self.mark = make_mark()
        self._env = {**os.environ, **hosts.env, **self.mark}
        self._go = folder / "go"
        self._asked = folder / "asked"
        nodes = json.dumps([{"host": host, "python": sys.executable} for host in hosts.addresses])
        command = json.dumps(["sh", "-c", f"echo >> {self._asked}; echo '{nodes}'"])
        self._spec = folder / "spec.yaml"
        self._spec.write_text(
            f"nodes: {{from: {{command: {command}}}}}\nenv_from: [{next(iter(self.mark))}]\n"
            f"program: {{command: ['{sys.executable}', '{TICKING}', '{self._go}']}}\n{rest}"
        )
        self.stderr = folder / "stderr"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self._popen("up", "--run-dir", str(self.folder), *arguments, str(self._spec))

    def resume(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self._popen("resume", *arguments, str(self.folder))

    def _popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.stderr.open("ab") as stderr:
            return subprocess.Popen(
                distlaunch_command(*arguments),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    @property
    def said(self) -> str:
        return self.stderr.read_text()

    @property
    def asked(self) -> int:
        """How often the command was run."""
        return len(self._asked.read_text())

    def log(self, worker: str, attempt: int = 1) -> Path:
        return self.folder / f"attempt-{attempt}" / f"{worker}.log"

    def wait_for(self, number: int, attempt: int = 1) -> None:
        for worker in WORKERS:
            wait_until(lambda: has_line(self.log(worker, attempt), number), f"{worker} has printed {number}", 60)  # noqa: B023

    def wait_for_state(self, state: str) -> None:
        def check() -> None:
            assert (self.folder / "events.jsonl").exists()
            assert states(self.folder)[-1:] == [state]

        eventually(check)

    def wait_for_takeover(self, generation: int) -> None:
        begun = f'"generation":{generation},'
        wait_until(lambda: begun in (self.folder / "events.jsonl").read_text(), "the next controller has begun")
        wait_until(lambda: self.said.count("taken over; its tasks continue") >= 2 * generation, "it has both nodes")

    def finish(self) -> None:
        self._go.touch()


class TestTakeover:
    def test_tasks_continue_while_their_controllers_are_killed(self, hosts: Hosts, tmp_path: Path) -> None:
        """Three controllers are killed one after the other; the fourth sees the end of the run."""
        run = Ticking(hosts, tmp_path)
        process = run.start()
        run.wait_for_state("running")
        for number in range(1, 4):
            run.wait_for(20 * number)
            process.kill()
            process.wait()
            process = run.resume()
            run.wait_for_takeover(number)
        run.wait_for(20 * 4)
        run.finish()
        assert process.wait(60) == 0, run.said
        assert run.asked == 1  # no controller asks for nodes while their tasks run
        for worker in WORKERS:
            check_log(run.log(worker).read_bytes())
        report = json.loads((run.folder / "report.json").read_text())
        assert [attempt["attempt"] for attempt in report["attempts"]] == [1]
        pids = {task["pid"] for task in report["attempts"][0]["tasks"]}
        assert len(pids) == 2
        assert (report["outcome"], run_json(run.folder)["generation"]) == ("succeeded", 3)
        goodput = read_goodput(run.folder)
        attempt = report["attempts"][0]
        up, ended = attempt["cluster_up"], max(task["ended"] for task in attempt["tasks"])
        assert goodput["restarting_s"] == 0
        assert goodput["training_s"] == pytest.approx(ended - up, abs=0.2)  # as exact as a node's clock is known
        await_none_left(run.mark)

    def test_a_resume_after_the_lease_starts_the_cluster_again(self, hosts: Hosts, tmp_path: Path) -> None:
        run = Ticking(hosts, tmp_path, "timeouts: {lease_s: 3, stop_grace_s: 1}\n")
        process = run.start("-d")
        assert process.wait(60) == 0, run.said
        run.wait_for(3)
        os.kill(run_json(run.folder)["controller"]["pid"], signal.SIGKILL)
        await_none_left(run.mark)
        assert run.resume("-d").wait(60) == 0, run.said
        run.wait_for(3, attempt=2)
        controller = run_json(run.folder)["controller"]["pid"]
        run.finish()
        wait_until(lambda: run_json(run.folder)["ended"], f"the run of {controller} has ended")
        assert run_json(run.folder)["outcome"] == "succeeded"
        check_log(run.log("worker-0", 2).read_bytes())
