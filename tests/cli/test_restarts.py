"""A failed cluster is started again as one, within its budget, depending on what failed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import assert_none_left, make_mark, marked, wait_until

COVERS = (
    "launcher/gang",
    "launcher/controller/nodes.py",
    "launcher/controller/supervisor.py",
    "launcher/controller/attempt.py",
)

FLAKY = str(PROGRAMS / "fail_at_first.py")


# --- real processes ---


def test_a_failed_cluster_is_restarted_with_all_its_tasks(distlaunch: Distlaunch) -> None:
    mark = make_mark()
    ran = distlaunch("local", "-n", "3", "--max-restarts", "2", "--", "python3", FLAKY, "3", "worker:1", "7", env=mark)
    assert ran.status == 0, ran.stderr
    assert [attempt["verdict"]["reference"] for attempt in ran.report["attempts"]] == [
        "task-failed",
        "task-failed",
        "succeeded",
    ]
    assert "Restarting: attempt 2 (restart 1 of 2)" in ran.stderr
    assert "Restarting in 1 s: attempt 3 (restart 2 of 2)" in ran.stderr
    assert "    1: worker:1 on local exited with status 7 after" in ran.stderr
    assert "0 processes left on this machine" in ran.stderr
    assert_none_left(mark)
    run_ids = set()
    for number, attempt in enumerate(ran.report["attempts"], 1):
        assert attempt["attempt"] == number
        assert [task["task"] for task in attempt["tasks"]] == ["worker:0", "worker:1", "worker:2"]
        assert attempt["processes_left"] == 0
        for task in attempt["tasks"]:
            assert task["log"].startswith(f"attempt-{number}/")
            said = re.search(
                r"attempt (\d) of (\S+), checkpoints in (\S+)\n", (ran.directory / task["log"]).read_text()
            )
            assert said is not None
            assert int(said[1]) == number
            run_ids.add((said[2], said[3]))
    [(run_id, checkpoints)] = run_ids  # the same for all tasks of all attempts
    assert run_id == ran.report["run_id"]
    assert Path(checkpoints) == ran.directory / "checkpoints"
    for before, after in zip(ran.report["attempts"], ran.report["attempts"][1:], strict=False):
        assert before["ended"] < min(task["started"] for task in after["tasks"])


@pytest.mark.slow
def test_all_processes_of_an_attempt_end_before_the_next_attempt_starts(distlaunch: Distlaunch) -> None:
    """A child that ignores SIGTERM outlives its task, but must end before the next attempt starts."""
    script = (
        "import os, signal, subprocess, sys, time; "
        "left = os.environ.get('PIDS'); "
        "old = [int(p) for p in open(left).read().split()] if os.path.exists(left) else []; "
        "assert not [p for p in old if os.path.exists(f'/proc/{p}')], 'somebody is left'; "
        "c = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); "
        "time.sleep(60)'], start_new_session=True); "
        "open(left, 'a').write(f'{c.pid} {os.getpid()} '); "
        "time.sleep(0.5); sys.exit(7 if os.environ['DISTLAUNCH_ATTEMPT'] < '3' else 0)"
    )
    ran = distlaunch(
        "local", "-n", "1", "--max-restarts", "2", "--", "python3", "-c", script, env={"PIDS": "pids"}, timeout=60
    )
    assert ran.status == 0, ran.stderr + ran.stdout


@pytest.mark.slow
def test_down_ends_a_restart_pause_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("nodes: [{host: local}]\nrestart: {max_restarts: 3, pause_s: 500}\nprogram: {command: ['false']}\n")
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(distlaunch_command("up", "--run-dir", "run", str(spec)), cwd=tmp_path, stderr=stderr)
    with process:
        try:
            wait_until(lambda: "Restarting in 500 s" in (tmp_path / "stderr").read_text(), "it pauses")
            assert end(tmp_path) == (0, f"Stopped: {tmp_path}/run\n")
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
    assert os.path.exists(tmp_path / "run" / "report.json")
    assert "Interrupted after" in (tmp_path / "stderr").read_text()


def end(folder: Path) -> tuple[int, str]:
    asked = subprocess.run(
        distlaunch_command("down", "./run"), cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    return asked.returncode, asked.stdout


@pytest.mark.slow
def test_down_stops_a_run_and_waits_until_no_process_is_left(tmp_path: Path) -> None:
    mark = make_mark()
    with (tmp_path / "stderr").open("wb") as stderr:
        command = distlaunch_command("local", "-n", "2", "--run-dir", "run", "--", "sleep", "600")
        process = subprocess.Popen(command, cwd=tmp_path, stderr=stderr, env={**os.environ, **mark})
    with process:
        try:
            wait_until(lambda: len(marked(mark)) > 4, "the tasks run")
            assert end(tmp_path) == (0, f"Stopped: {tmp_path}/run\n")
            assert_none_left(mark)
            assert process.wait(timeout=20) == 143
        finally:
            process.kill()
    assert end(tmp_path) == (0, f"Already ended: {tmp_path}/run\n")


@pytest.mark.slow
def test_a_controller_error_between_attempts_sets_the_report_and_exit_status(distlaunch: Distlaunch) -> None:
    """The second attempt cannot write its plan, because a folder has the name of the file."""
    in_the_way = 'rm "$0/plan.json"; mkdir -p "$0/plan.json/x"; exit 1'
    run = distlaunch("local", "--dry-run", "--", "true").directory
    ran = distlaunch("local", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", in_the_way, str(run))
    assert ran.status == ran.report["exit_status"] == 3
    told = (
        f"Error: cannot write {run}/plan.json: Is a directory [run-directory]\n  choose another folder with --run-dir\n"
    )
    summary = "  2 attempts; before the last one:\n    1: worker:0 on local exited with status 1 after "
    assert re.search(f"{re.escape(told)}  0 processes left on this machine\n{re.escape(summary)}", ran.stderr)
    assert ran.stderr.count("Error: cannot write") == 1
    assert (ran.report["outcome"], ran.report["verdict"]["reference"]) == ("failed", "run-directory")
    assert [attempt["verdict"]["reference"] for attempt in ran.report["attempts"]] == ["task-failed", "run-directory"]
