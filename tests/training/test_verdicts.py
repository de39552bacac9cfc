"""The verdict names the worker that broke a real cluster of three workers, and how, even if others end first."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.processes.failing_runs import FAIL, WAYS
from tests.harness.witness import assert_none_left, make_mark

COVERS = ("launcher/verdict", "launcher/gang")


@pytest.mark.parametrize("culprit", ["worker:0", "worker:1"])
@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.smoke) if how == "kill" else how for how in WAYS])
def test_the_verdict_names_the_worker_that_broke_the_cluster(warm: Distlaunch, culprit: str, how: str) -> None:
    assert_named(warm, culprit, how)


@pytest.mark.parametrize("how", ["raise-early", "exit-text"])
def test_the_verdict_names_the_worker_that_broke_an_unforked_cluster(distlaunch: Distlaunch, how: str) -> None:
    """Only the ways in which an unforked task could end differently from a forked one."""
    assert_named(distlaunch, "worker:1", how, "--set", "preload=false", workers=2)


def assert_named(distlaunch: Distlaunch, culprit: str, how: str, *flags: str, workers: int = 3) -> None:
    mark = make_mark()
    ran = distlaunch("local", "--workers", str(workers), *flags, FAIL, culprit, how, env=mark, timeout=120)
    reference, words = WAYS[how]
    verdict = ran.report["attempts"][0]["verdict"]
    assert (ran.status, verdict["task"], verdict["reference"]) == (1, culprit, reference), ran.stderr
    assert words in ran.stderr
    if "raise" in how:  # the user's own line, wherever TensorFlow has put it
        assert f"{FAIL}:16" in ran.stderr
    assert_none_left(mark)


def test_a_suspended_worker_is_named_at_once_and_in_the_verdict(warm: Distlaunch, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    # TensorFlow waits for a silent worker for as long as the lease.
    spec.write_text(
        "nodes: [{host: local, tasks: {worker: 3}}]\ntimeouts: {lease_s: 10}\n"
        f"program: {{script: {FAIL}, args: ['worker:1', stop]}}\n"
    )
    ran = warm("up", str(spec), timeout=120)
    verdict = ran.report["attempts"][0]["verdict"]
    assert (ran.status, verdict["task"], verdict["reference"]) == (3, "worker:1", "stalled"), ran.stderr
    assert "worker:1 was stopped by SIGSTOP (signal 19); the others wait for it" in ran.stderr
    assert "Error: worker:1 on local was stopped by SIGSTOP (signal 19) after" in ran.stderr


def test_a_worker_that_fails_because_the_leader_finished_fails_no_run(warm: Distlaunch) -> None:
    ran = warm("local", "--workers", "2", str(PROGRAMS / "late.py"), "worker:1")
    assert ran.status == 0, ran.stderr
    verdict = ran.report["attempts"][0]["verdict"]
    assert "UnavailableError" in ran.log("worker-1").decode()
    assert "StartAbort UNAVAILABLE" in ran.log("worker-1").decode()
    assert "StartAbort" not in ran.stdout
    assert [task["exit_code"] for task in ran.report["attempts"][0]["tasks"]] == [0, 1]
    assert verdict["message"] == "both workers finished"
    note = "worker:1 finished its program before its interpreter ended with exit status 1; this does not fail the run"
    assert verdict["evidence"] == [note]


def test_a_worker_killed_for_memory_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    with memory_limit(2 << 30) as enter:
        command = distlaunch_command("local", "--workers", "2", "--run-dir", "run", FAIL, "worker:1", "out-of-memory")
        ran = subprocess.run([*enter, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    assert "Error: worker:1 on local ran out of memory: it was killed by SIGKILL (signal 9) after" in ran.stderr
    assert "the kernel's OOM killer killed" in ran.stderr
    assert "[out-of-memory]" in ran.stderr


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[list[str]]:
    """The words before a command that run it in a control group of its own with so many bytes."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"distlaunch-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        finally:
            group.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")
