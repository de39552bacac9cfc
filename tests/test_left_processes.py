"""What a run has left on this machine, counted twice."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from launcher.console.terminal import PlainSink
from launcher.console.writer import Console
from launcher.run.left_processes import confirm_left, find_left_processes
from launcher.spec.models import LOCAL
from tests.conftest import Distlaunch
from tests.witness import wait_until


def test_a_process_that_the_agent_has_not_counted_is_reported() -> None:
    run_id = f"left-{os.getpid()}"
    env = {**os.environ, "DISTLAUNCH_RUN_ID": run_id}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as left:
        wait_until(lambda: find_left_processes(run_id) == [left.pid], "the process is found")
        errors = io.StringIO()
        console = Console(PlainSink(io.BytesIO(), errors))
        assert confirm_left({LOCAL: 0, "gpu-a": None}, run_id, console) == {LOCAL: 1, "gpu-a": None}
        console.close()
    said = f"Warning: the agent of this machine counts 0 processes left, psutil 1: {left.pid}\n"
    assert errors.getvalue() == said
    assert find_left_processes(run_id) == []


@pytest.mark.parametrize("left", [{}, {"gpu-a": 0}, {LOCAL: None}])
def test_other_machines_are_not_counted_here(left: dict[str, int | None]) -> None:
    console = Console(PlainSink(io.BytesIO(), io.StringIO()))
    assert confirm_left(left, "none", console) == left
    console.close()


def test_both_counts_agree_after_a_run_whose_tasks_leave_processes_behind(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--", "sh", "-c", "setsid sleep 1000 & exit 0")
    assert ran.status == 0, ran.stderr
    assert "processes that outlived their task were stopped" in ran.stderr
    assert "psutil" not in ran.stderr
    assert find_left_processes(ran.report["run_id"]) == []
