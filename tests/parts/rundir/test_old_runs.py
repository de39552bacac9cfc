"""Folders of runs that earlier versions have recorded stay readable; those of later versions are refused.

`old_runs/format_N` has folders as the first version with this format of run.json has written them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.errors import RunDirectoryError
from launcher.exporters.page_reading import read_material
from launcher.rundir.directory import RunDir
from launcher.rundir.history import read_history
from launcher.rundir.last_state import read_end_report, read_last_status
from launcher.rundir.record import FORMAT, RecordedRun
from launcher.rundir.summary import summarize
from tests.harness.places import ROOT
from tests.harness.processes.in_process import run_here

OLD = sorted((ROOT / "tests" / "old_runs").glob("format_*/*"))


@pytest.fixture(params=OLD, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / str(request.param.name)
    shutil.copytree(request.param, copy)
    return copy


def test_every_format_but_the_current_one_has_a_folder() -> None:
    assert {folder.parent.name for folder in OLD} == {f"format_{number}" for number in range(FORMAT)}


def test_all_files_of_an_old_run_are_read(folder: Path) -> None:
    run = RecordedRun(RunDir(folder))
    assert (run.record.name, run.record.ended, run.record.end.outcome) == ("local-2", True, "succeeded")
    assert [str(task.task) for task in run.plan.tasks] == ["worker:0", "worker:1"]
    assert {task.node for task in run.plan.tasks} == {"local"}
    assert run.parse_spec().restart.max_restarts == 1
    assert run.report["exit_status"] == 0
    entries, _ = run.read_journal()
    assert [entry["event"] for entry in (entries[0], entries[-1])] == ["run-started", "ended"]


def test_commands_show_an_old_run(folder: Path) -> None:
    summary = summarize(RunDir(folder))
    assert (summary.state, summary.restarts, summary.exit_status) == ("succeeded", 1, 0)
    report = read_end_report(RunDir(folder), summary)
    assert report is not None
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-failed", "succeeded"]
    assert {task.state for task in read_last_status(RunDir(folder), summary).tasks} == {"exit status 0"}
    shown = run_here("logs", str(folder), "--attempt", "1", cwd=folder.parent, env=None)
    assert sorted(shown.stdout.splitlines()) == [
        f"worker:{index} │ {line}" for index in (0, 1) for line in ("a warning", "epoch 1")
    ]


def test_an_old_run_has_its_history_and_its_page(folder: Path) -> None:
    history = read_history(folder / "events.jsonl")
    assert (history.attempt, [ending.reference for ending in history.endings]) == (2, ["task-failed", "succeeded"])
    material = read_material(RunDir(folder), now=0.0)
    assert (material.state, material.task_names) == ("succeeded", ["worker:0", "worker:1"])


def test_a_folder_of_a_later_version_is_refused(folder: Path) -> None:
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "format": FORMAT + 1}))
    with pytest.raises(RunDirectoryError, match=rf"a later version of distlaunch \(format {FORMAT + 1}\)"):
        _ = RecordedRun(RunDir(folder)).record
    shown = run_here("status", str(folder), cwd=folder.parent, env=None)
    assert (shown.returncode, shown.stderr.splitlines()[-1]) == (3, "  update distlaunch")
