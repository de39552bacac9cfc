"""What keeps `distlaunch profile` from a profile is told; the profiler itself is tested with a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import profile as profiles
from launcher.commands.profile import ProfileError, profile
from launcher.errors import DistlaunchError, RunDirectoryError, UsageError
from launcher.run.directory import RunDir, RunStart
from launcher.spec.models import ClusterSpec


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose controller is this process."""
    files = RunDir.create(tmp_path / "run")
    with files.hold(RunStart(run_id="run", name="local", started=0.0)):
        yield files


def write(files: RunDir, *, log_directory: str | None = "/logs", python: Path | None = None, servers: int = 2) -> None:
    """A run's spec and plan; `python` is the tasks'."""
    spec = {"nodes": [{"host": "local", "tasks": {"worker": 2}}], "program": {"script": "train.py"}}
    files.write_text(files.spec, ClusterSpec.model_validate({**spec, "log_directory": log_directory}).model_dump_json())
    tasks: list[dict[str, Any]] = [
        {
            "task": f"worker:{index}",
            "node": "local",
            "python": str(python),
            "address": "127.0.0.1",
            "port": 1,
            "tf_config": {"task": {"type": "worker", "index": index}} if index < servers else None,
        }
        for index in range(2)
    ]
    files.write_json(files.plan, {"tasks": tasks})


def write_python(folder: Path, script: str) -> Path:
    """An interpreter that does this instead of what it is told."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def refused(files: RunDir, kind: type[DistlaunchError]) -> str:
    with pytest.raises(kind) as caught:
        profile(files, 0.1)
    return caught.value.message


def test_a_run_that_has_no_plan_yet(files: RunDir) -> None:
    assert refused(files, RunDirectoryError).startswith(f"cannot read {files.plan}: ")


def test_a_run_without_a_log_directory(files: RunDir) -> None:
    write(files, log_directory=None)
    assert refused(files, UsageError) == "the run has no log directory"


def test_a_run_without_a_server(files: RunDir) -> None:
    write(files, servers=0)
    assert refused(files, UsageError) == "no task of this run has a profiler server"


def test_a_python_without_grpc(files: RunDir, tmp_path: Path) -> None:
    write(files, python=write_python(tmp_path, "echo first >&2; echo 'ModuleNotFoundError: grpc' >&2; exit 1"))
    assert refused(files, ProfileError) == "the tasks could not be profiled: ModuleNotFoundError: grpc"


def test_tasks_that_do_not_answer(files: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files, python=write_python(tmp_path, "exec sleep 600"))
    monkeypatch.setattr(profiles, "GATHER_S", 0.0)
    monkeypatch.setattr(profiles, "MARGIN_S", -0.4)
    assert refused(files, ProfileError) == "the tasks do not answer"


@pytest.mark.parametrize("silent", [["worker-0"], ["worker-0", "worker-1"]])
def test_tasks_that_recorded_nothing(files: RunDir, tmp_path: Path, silent: list[str]) -> None:
    answer = json.dumps({"directory": "/logs/session", "silent": silent, "failed": {}})
    write(files, python=write_python(tmp_path, f"cat > {tmp_path}/order; echo '{answer}'"))
    if len(silent) == 2:
        assert refused(files, ProfileError) == "no task recorded anything"
    else:
        assert profile(files, 0.1).files == (Path("/logs/session/worker-1.xplane.pb"),)
    order = json.loads((tmp_path / "order").read_text())
    assert (order["directory"], [*order["tasks"]]) == ("/logs", ["worker-0", "worker-1"])
