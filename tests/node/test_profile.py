"""`distlaunch profile` reports what prevents a profile; the profiler itself is tested with a real cluster."""

from __future__ import annotations

import json
import selectors
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher.commands import profile as profiles
from launcher.commands.profile import ProfileError, profile
from launcher.errors import UsageError
from launcher.rundir.directory import RunDir, RunStart
from tests.harness.processes.background import running
from worker_entry.agent.helpers.profile import ProfileChild
from worker_entry.protocol.profiles import Profile, Profiled, ProfileTarget

ORDER = Profile([ProfileTarget("worker-0", "127.0.0.1:1", operations=True)], "/logs", 0.1)
TASKS = ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Profiled("/logs/s", silent=TASKS), "no task recorded anything"),
        (Profiled("/logs/s", failed={"worker-0": "gone"}), "some tasks could not be profiled"),
        (Profiled(problem="no grpc"), "the tasks could not be profiled: no grpc"),
        (Profiled("/logs/s", silent=["worker-0"]), ""),
    ],
)
def test_profile_returns_the_recorded_files_or_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Profiled, error: str
) -> None:
    said = json.dumps({"tasks": TASKS, "answer": asdict(answer)})
    monkeypatch.setattr(profiles, "ask_profile", lambda files, duration_s: said)
    files = RunDir.create(tmp_path / "run")
    with files.hold(RunStart(run_id="run", name="local", started=0.0)):
        if not error:
            assert profile(files, 0.1) == profiles.Capture((Path("/logs/s/worker-1.xplane.pb"),), ("worker-0",))
            return
        with pytest.raises(ProfileError) as caught:
            profile(files, 0.1)
    assert caught.value.message == error


def test_profile_refuses_a_run_that_has_ended(tmp_path: Path) -> None:
    files = RunDir.create(tmp_path / "run")
    with files.hold(RunStart(run_id="run", name="local", started=0.0)):
        pass
    with pytest.raises(UsageError, match="has ended"):
        profile(files, 0.1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-n", "1"], "no task of this run has a profiler server: run two workers or more"),
        (["-n", "2", "--", "sh", "-c", "echo begun; exec sleep 60"], "worker-0: failed to connect"),
    ],
)
def test_profile_explains_why_no_task_can_be_profiled(tmp_path: Path, options: list[str], why: str) -> None:
    if "--" not in options:
        options = [*options, "--", "sh", "-c", "echo begun; exec sleep 60"]
    with running(tmp_path, *options) as run:
        run.wait_for(b"begun", 0)
        with pytest.raises(ProfileError) as caught:
            profile(RunDir(tmp_path / "run"), 0.1)
    assert why in "\n".join([caught.value.message, *caught.value.evidence])


# --- the agent's child ---


def write_python(folder: Path, script: str) -> str:
    """An interpreter that runs this script and ignores its arguments."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo first >&2; echo 'ModuleNotFoundError: grpc' >&2; exit 1", Profiled(problem="ModuleNotFoundError: grpc")),
        ("exit 1", Profiled(problem="it said nothing")),
        ("echo '[1]'", Profiled(problem="[1]")),
        (
            """echo noise; echo '{"directory": "/logs/s", "silent": ["worker-0"], "failed": {}}'""",
            Profiled("/logs/s", ["worker-0"]),
        ),
    ],
)
def test_the_output_of_the_profiling_process_becomes_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, answer: Profiled
) -> None:
    monkeypatch.setattr(sys, "executable", write_python(tmp_path, f"cat >{tmp_path}/order\n{script}"))
    selector, answers = selectors.DefaultSelector(), list[Profiled]()
    child = ProfileChild(selector, answers.append)
    child.begin(ORDER)
    child.begin(ORDER)
    turn(selector, answers, 2)
    assert answers == [Profiled(problem="another profile is being captured"), answer]
    assert not child.pids
    assert json.loads((tmp_path / "order").read_text()) == {
        "tasks": {"worker-0": {"address": "127.0.0.1:1", "operations": True}},
        "directory": "/logs",
        "duration_s": 0.1,
    }


def test_a_stop_of_the_tasks_ends_a_profile_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", write_python(tmp_path, "exec sleep 600"))
    selector, answers = selectors.DefaultSelector(), list[Profiled]()
    child = ProfileChild(selector, answers.append)
    child.begin(ORDER)
    child.end()
    assert answers == [Profiled(problem="the tasks are being stopped")]
    assert not child.pids
    assert not selector.get_map()
    child.end()
    assert len(answers) == 1


def turn(selector: selectors.BaseSelector, answers: list[Profiled], wanted: int) -> None:
    deadline = time.monotonic() + 30
    while len(answers) < wanted:
        assert time.monotonic() < deadline
        for key, _ in selector.select(0.1):
            key.data()
