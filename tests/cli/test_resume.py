"""`resume`: a new controller takes a run over while it trains, or starts it again once nothing is left of it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launcher.clock import SystemTiming
from launcher.commands.requests import ask_status, ask_to_end
from launcher.console.terminal import NowhereSink
from launcher.console.writer import Console
from launcher.controller.resume import await_leases
from launcher.errors import InterruptionError, UsageError
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.history import read_history
from launcher.rundir.journal import Journal
from launcher.rundir.record import last_written
from launcher.signals import Interrupts
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.processes.resumed_runs import read_goodput, run_json
from tests.harness.witness import await_none_left, make_mark
from worker_entry.protocol.frozen import replace

COVERS = ("launcher/rundir", "launcher/sources", "launcher/controller", "launcher/commands")


def test_a_resume_is_rejected_if_another_process_has_just_resumed(tmp_path: Path) -> None:
    """It has read the record and the history before the other resume wrote them."""
    files = RunDir.create(tmp_path / "run")
    with files.hold(RunStart(run_id="x", name="x", started=1.0)):
        pass
    second = RunStart(run_id="x", name="x", started=1.0, generation=1)
    with files.hold(second):
        pass
    before = files.events.read_bytes()
    for late in (second, RunStart(run_id="x", name="x", started=1.0)):
        with pytest.raises(UsageError, match="another process has just resumed the run"), files.hold(late):
            pass
    assert files.events.read_bytes() == before
    assert run_json(files.root)["generation"] == 1


def test_the_last_contact_is_the_last_write_of_a_controller_with_tasks(tmp_path: Path) -> None:
    """A resume that did not reach the tasks, such as an interrupted one, does not make later resumes wait again."""
    files = RunDir.create(tmp_path / "run")
    start = RunStart(run_id="x", name="x", started=1.0)
    with files.hold(start) as journal:
        journal.begin_attempt(1, {})
        journal.note_state("running")
        os.utime(files.events, (2e9, 2e9))  # as `touch` does, long after the last event
    os.utime(files.run, (1.0, 1.0))
    history = read_history(files)
    assert history.is_attended
    assert last_written(files) == 2e9
    for generation in (1, 2):
        with files.hold(replace(start, generation=generation)) as journal:
            journal.note_state("stopping")
        history = read_history(files)
        assert (history.attended, history.is_attended) == (2e9, False)


def test_an_idle_controller_keeps_the_time_of_its_journal_recent(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", time.time)
    os.utime(tmp_path / "events.jsonl", (1.0, 1.0))
    journal.touch()
    assert time.time() - (tmp_path / "events.jsonl").stat().st_mtime < 60
    journal.close()
    journal.touch()


def test_the_lease_wait_counts_from_the_last_contact_and_ends_on_sigint() -> None:
    said = Console(NowhereSink())
    interrupts = Interrupts()
    began = time.monotonic()
    await_leases(time.time() - 3600, 60.0, said, interrupts, SystemTiming())
    threading.Timer(0.2, interrupts.ask, [signal.SIGINT]).start()
    with pytest.raises(InterruptionError):
        await_leases(time.time(), 3600.0, said, interrupts, SystemTiming())
    assert time.monotonic() - began < 60


@pytest.mark.slow
class TestResumeCommand:
    @pytest.mark.smoke
    def test_resume_continues_attempt_numbers_and_reports_all_attempts(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        first = distlaunch("local", "-n", "2", "--", "sh", "-c", "echo tried; test -e ok")
        assert first.status == 1
        (tmp_path / "ok").touch()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        again = distlaunch("resume", str(first.directory), run_dir=False, cwd=elsewhere)
        assert again.status == 0, again.stderr
        report = json.loads((first.directory / "report.json").read_text())
        verdicts = [(attempt["attempt"], attempt["verdict"]["reference"]) for attempt in report["attempts"]]
        assert verdicts == [(1, "task-failed"), (2, "succeeded")]
        assert (first.directory / "attempt-2" / "worker-1.log").read_bytes() == b"tried\n"
        assert report["started"] == first.report["started"]
        assert run_json(first.directory)["generation"] == 1
        between_s = report["attempts"][1]["started"] - report["attempts"][0]["ended"]
        assert read_goodput(first.directory)["restarting_s"] >= between_s > 0

    def test_resume_accepts_another_spec(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        first = distlaunch("local", "-n", "1", "--", "false")
        spec = tmp_path / "spec.yaml"
        spec.write_text("nodes: [{host: local, tasks: {worker: 1}}]\nprogram: {command: [echo, other]}\n")
        again = distlaunch("resume", str(first.directory), "--spec", str(spec), run_dir=False)
        assert (again.status, again.stdout) == (0, "worker:0 │ other\n")

    def test_resume_takes_secrets_from_the_environment(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            "nodes: [{host: local}]\nenv: {API_KEY: sesame}\nprogram: {command: [sh, -c, 'test $API_KEY = right!']}\n"
        )
        first = distlaunch("up", "--no-check", str(spec))
        assert first.status == 1
        before = (first.directory / "events.jsonl").read_bytes()
        without = distlaunch("resume", str(first.directory), run_dir=False)
        assert without.status == 2
        assert "not set in this environment: API_KEY [usage]" in without.stderr
        assert (first.directory / "events.jsonl").read_bytes() == before
        with_it = distlaunch("resume", str(first.directory), run_dir=False, env={"API_KEY": "right!"})
        assert with_it.status == 0, with_it.stderr
        assert "right!" not in (first.directory / "spec.json").read_text().replace("API_KEY = right!", "")

    def test_resume_rejects_a_running_run(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        started = distlaunch("local", "-d", "-n", "1", "--", "sleep", "600")
        assert started.status == 0
        try:
            done = distlaunch("resume", str(folder), run_dir=False)
            assert done.status == 2
            assert "is still running [usage]\n  follow it: `distlaunch attach" in done.stderr
        finally:
            ask_to_end(RunDir(folder))

    def test_only_one_of_two_concurrent_resumes_succeeds(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        first = distlaunch("local", "-n", "1", "--", "sh", "-c", "test -e ok && exec sleep 600")
        (tmp_path / "ok").touch()
        command = distlaunch_command("resume", "-d", str(first.directory))
        both = [subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL) for _ in range(2)]
        try:
            assert sorted(process.wait(60) for process in both) == [0, 2]
            assert ask_status(RunDir(first.directory)).attempt == 2
        finally:
            ask_to_end(RunDir(first.directory))

    def test_a_run_from_before_a_reboot_is_lost_and_can_be_resumed(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        first = distlaunch("local", "-d", "-n", "1", "--", "sh", "-c", "test -e ok || exec sleep 600")
        (tmp_path / "ok").touch()
        facts = run_json(first.directory)
        os.kill(facts["controller"]["pid"], signal.SIGKILL)
        with (first.directory / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits until all threads of the controller have ended
        facts["controller"] |= {"pid": os.getpid(), "boot": "2f6c1c6e-0000-4000-8000-000000000000"}
        (first.directory / "run.json").write_text(json.dumps(facts))
        waited = distlaunch("wait", str(first.directory), run_dir=False)
        assert (waited.status, waited.stdout) == (3, "run: lost\n")
        again = distlaunch("resume", str(first.directory), run_dir=False)
        assert again.status == 0, again.stderr

    @pytest.mark.smoke
    def test_a_running_run_is_recognized_on_a_file_system_without_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr("fcntl.flock", no_locks)
        files = RunDir.create(tmp_path / "run")
        with files.hold(RunStart(run_id="x", name="x", started=1.0)):
            assert files.read_run()[1] is not None

    def test_resume_stops_leftovers_of_a_lost_local_run_and_restarts_it(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        mark = make_mark()
        started = distlaunch("local", "-d", "-n", "1", "--", "sh", "-c", "test -e ok || exec sleep 600", env=mark)
        assert started.status == 0
        (tmp_path / "ok").touch()
        os.kill(run_json(started.directory)["controller"]["pid"], signal.SIGKILL)
        again = distlaunch("resume", str(started.directory), run_dir=False)
        assert again.status == 0, again.stderr
        assert "Stopping leftover processes of the last attempt" in again.stderr
        await_none_left(mark)
        assert (started.directory / "attempt-2").is_dir()
        assert read_goodput(started.directory)["restarting_s"] > 0
