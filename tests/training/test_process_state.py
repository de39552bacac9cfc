"""A program sees the same state of its process as under plain Python; the README lists the differences."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import worker_entry
from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch
from worker_entry.protocol import environment

COVERS = ("worker_entry/task", "worker_entry/agent/tasks/task.py", "worker_entry/agent/tasks/forkserver.py")

pytestmark = linux
PROGRAM = str(PROGRAMS / "process_state.py")
AGE_S = "60"
"""No process of the test is older than this, except the forkserver, with imports that are not the program's."""
README = Path(worker_entry.__file__).with_name("README.md")
OF_TESTS = frozenset({"PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START", "SHLVL", "_"})
"""Variables that tests and shells add on one side only."""


def run_plainly(folder: Path, arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # as tasks have it
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_as_tasks(distlaunch: Distlaunch, folder: Path, *options: str) -> list[dict[str, Any]]:
    ran = distlaunch("local", "-n", "2", *options, PROGRAM, AGE_S, "tensorflow", cwd=folder)
    assert ran.status == 0, ran.stderr
    return [json.loads(ran.log(f"worker-{number}").splitlines()[0]) for number in range(2)]


def render(plain: dict[str, Any], task: dict[str, Any]) -> dict[str, str]:
    """The rows of the README's table, by the facts that differ."""
    rows = {
        fact: f"| `{fact}` | {value} | {task['facts'][fact]} |"
        for fact, value in plain["facts"].items()
        if task["facts"][fact] != value
    }
    added = sorted(task["environ"].keys() - plain["environ"].keys() - OF_TESTS)
    return rows | {"os.environ": f"| `os.environ` | | {', '.join(f'`{name}`' for name in added)} in addition |"}


@pytest.mark.slow
def test_process_state_differs_from_plain_python_only_as_documented(
    distlaunch: Distlaunch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*environment.DEFAULTS, "PYTHONHASHSEED"):  # a parallel test run sets the latter
        monkeypatch.delenv(name, raising=False)
    plain = run_plainly(tmp_path, [AGE_S, "tensorflow"])
    forked, other = run_as_tasks(distlaunch, tmp_path)
    assert forked["hash"] == other["hash"] != plain["hash"]
    rows = render(plain, forked)
    print("\n".join(rows.values()))
    common = plain["environ"].keys() & forked["environ"].keys() - OF_TESTS
    assert {name: forked["environ"][name] for name in common} == {name: plain["environ"][name] for name in common}
    first, last = "| What a program sees |", "| `os.environ` |"
    lines = README.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    end = next(number for number, line in enumerate(lines) if line.startswith(last))
    assert lines[begin + 2 : end + 1] == [*rows.values()]
    shutil.rmtree(tmp_path / "run")
    separate, other = run_as_tasks(distlaunch, tmp_path, "--set", "preload=false")
    assert separate["hash"] != other["hash"]
    assert render(plain, separate).keys() <= rows.keys()
