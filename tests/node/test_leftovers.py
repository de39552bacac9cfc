"""Processes that a run has left on this machine, counted by the agent and again by psutil."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.commands.clean import clean
from launcher.console.terminal import PlainSink
from launcher.console.writer import Console
from launcher.controller.leftovers import confirm_left
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.names import runs_directory
from launcher.rundir.owner import find_left_processes
from launcher.tasks import LOCAL
from tests.harness.processes.commands import Distlaunch
from tests.harness.witness import wait_until


def test_a_leftover_process_that_the_agent_missed_is_reported() -> None:
    run_id = f"left-{os.getpid()}"
    env = {**os.environ, "DISTLAUNCH_RUN_ID": run_id}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as left:
        wait_until(lambda: find_left_processes(run_id) == [left.pid], "the process is found")
        errors = io.StringIO()
        console = Console(PlainSink(io.BytesIO(), errors))
        assert confirm_left({LOCAL: 0, "gpu-a": None}, run_id, console) == {LOCAL: 1, "gpu-a": None}
        console.close()
    said = f"Warning: the agent on this machine counts 0 processes left, but psutil counts 1: {left.pid}\n"
    assert errors.getvalue() == said
    assert find_left_processes(run_id) == []


@pytest.mark.parametrize("left", [{}, {"gpu-a": 0}, {LOCAL: None}])
def test_leftover_processes_of_other_machines_are_not_counted(left: dict[str, int | None]) -> None:
    console = Console(PlainSink(io.BytesIO(), io.StringIO()))
    assert confirm_left(left, "none", console) == left
    console.close()


def test_agent_and_psutil_agree_after_tasks_leave_processes_behind(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--", "sh", "-c", "setsid sleep 1000 & exit 0")
    assert ran.status == 0, ran.stderr
    assert "processes that outlived their task were stopped" in ran.stderr
    assert "psutil counts" not in ran.stderr
    assert find_left_processes(ran.report["run_id"]) == []


def test_clean_with_a_local_spec_stops_processes_of_ended_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = runs_directory(os.environ)
    (runs / "no-run").mkdir(parents=True)
    ended, running = f"ended-{os.getpid()}", f"running-{os.getpid()}"
    with RunDir.create(runs / ended).hold(RunStart(run_id=ended, name="local", started=0.0)):
        pass
    spec = tmp_path / "local.yaml"
    spec.write_text("nodes: [{host: local}]\nprogram: {script: train.py}\n")
    with contextlib.ExitStack() as stack:
        stack.enter_context(RunDir.create(runs / running).hold(RunStart(run_id=running, name="local", started=0.0)))
        of = {}
        for run_id in (ended, running):
            env = {**os.environ, "DISTLAUNCH_RUN_ID": run_id}
            of[run_id] = stack.enter_context(subprocess.Popen(["sleep", "600"], env=env))
            stack.callback(of[run_id].kill)
        reaper = threading.Thread(target=of[ended].wait)
        reaper.start()
        assert [str(node) for node in clean(str(spec))] == ["local: 1 process stopped, 0 left"]
        reaper.join()
        assert (of[ended].returncode, of[running].poll()) == (-signal.SIGTERM, None)
