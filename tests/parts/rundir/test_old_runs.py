"""Folders of runs that earlier versions have recorded stay readable; those of later versions are refused.

`old_runs/format_N` has folders as a version with this format of run.json has written them; the last are today's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.errors import RunDirectoryError
from launcher.exporters.page_reading import read_page_data
from launcher.pages.html import render_page
from launcher.rundir.directory import RunDir
from launcher.rundir.history import read_history
from launcher.rundir.last_state import read_end_report, read_last_status
from launcher.rundir.record import FORMAT, RecordedRun
from launcher.rundir.summary import summarize
from launcher.spec.parts import ConnectionCommandSpec
from tests.harness.places import ROOT
from tests.harness.processes.in_process import run_here
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Expected:
    """`states`: of the tasks, at the end of the last attempt. `references`: of the attempts."""

    name: str
    outcome: str
    exit_status: int
    nodes: dict[str, str]
    connections: list[object]
    references: list[str]
    states: list[str]


RUNS = {
    "restarted": Expected(
        name="local-2",
        outcome="succeeded",
        exit_status=0,
        nodes={"worker:0": "local", "worker:1": "local"},
        connections=["paramiko"],
        references=["task-failed", "succeeded"],
        states=["exit status 0", "exit status 0"],
    ),
    "failed": Expected(
        name="two-machines",
        outcome="failed",
        exit_status=1,
        nodes={"worker:0": "gpu-a", "worker:1": "gpu-b"},
        connections=[
            ConnectionCommandSpec(command=["sh", "-c", "{command}"]),
            ConnectionCommandSpec(command=["sh", "-c", "export SITE=b; {command}"]),
        ],
        references=["task-failed"],
        states=["SIGTERM (signal 15), stopped by distlaunch", "exit status 3"],
    ),
}
OLD = sorted((ROOT / "tests" / "old_runs").glob("format_*/*"))


@pytest.fixture(params=OLD, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / str(request.param.name)
    shutil.copytree(request.param, copy)
    return copy


def test_every_run_format_has_a_folder_of_old_runs() -> None:
    assert {folder.parent.name for folder in OLD} == {f"format_{number}" for number in range(FORMAT + 1)}


def test_all_files_of_an_old_run_can_be_read(folder: Path) -> None:
    run, expected = RecordedRun(RunDir(folder)), RUNS[folder.name]
    assert (run.record.name, run.record.ended) == (expected.name, True)
    assert (run.record.end.outcome, run.record.end.exit_status) == (expected.outcome, expected.exit_status)
    assert {str(task.task): task.node for task in run.plan.tasks} == expected.nodes
    spec = run.parse_spec()
    assert spec.restart.max_restarts == len(expected.references) - 1
    assert [node.connection or spec.connection for node in spec.nodes] == expected.connections
    assert run.report["exit_status"] == expected.exit_status
    lines, _ = run.read_journal()
    assert [line.kind for line in (lines[0], lines[-1])] == ["run-started", "ended"]


def test_ls_status_and_logs_can_show_an_old_run(folder: Path) -> None:
    summary, expected = summarize(RunDir(folder)), RUNS[folder.name]
    assert (summary.state, summary.exit_status) == (expected.outcome, expected.exit_status)
    assert summary.restarts == len(expected.references) - 1
    report = read_end_report(RunDir(folder), summary)
    assert report is not None
    assert [attempt.verdict.reference for attempt in report.attempts] == expected.references
    assert [task.state for task in read_last_status(RunDir(folder), summary).tasks] == expected.states
    shown = run_here("logs", str(folder), "--attempt", "1", cwd=folder.parent, env=None)
    assert sorted(shown.stdout.splitlines()) == [
        f"worker:{index} │ {line}" for index in (0, 1) for line in ("a warning", "epoch 1")
    ]
    messages = run_here("logs", str(folder), "--distlaunch", cwd=folder.parent, env=None).stdout
    assert messages.startswith("Starting 2 tasks on ")


def test_the_history_and_page_of_an_old_run_can_be_made(folder: Path) -> None:
    history, expected = read_history(RunDir(folder)), RUNS[folder.name]
    assert [ending.reference for ending in history.endings] == expected.references
    assert history.attempt == len(expected.references)
    data = read_page_data(RunDir(folder), now=0.0)
    assert (data.state, data.task_names) == (expected.outcome, ["worker:0", "worker:1"])
    assert "Starting 2 tasks on " in render_page(data)


def test_a_run_folder_of_a_later_version_is_rejected(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "format": FORMAT + 1}))
    with pytest.raises(RunDirectoryError, match=rf"a later version of distlaunch \(format {FORMAT + 1}\)"):
        _ = RecordedRun(RunDir(folder)).record
    shown = run_here("status", str(folder), cwd=folder.parent, env=None)
    assert (shown.returncode, shown.stderr.splitlines()[-1]) == (3, "  update distlaunch")


def test_the_known_nodes_of_an_old_slurm_run_are_read(folder: Path) -> None:
    known = [{"host": f"n{index}", "way": "slurm", "tasks": {"worker": 1}} for index in (1, 2)]
    spec = {"nodes": {"from": "slurm", "known": known}, "program": {"command": ["true"]}}
    (folder / "spec.json").write_text(json.dumps(spec))
    nodes = RecordedRun(RunDir(folder)).parse_spec().nodes
    assert [(node.host, node.connection) for node in nodes] == [("n1", "slurm"), ("n2", "slurm")]
