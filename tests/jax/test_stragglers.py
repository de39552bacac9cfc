"""The process of JAX that keeps the others waiting by its Python code or its input is named, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import write_spec

COVERS = ("launcher/gang/watch", "worker_entry/hooks/jax_time.py", "worker_entry/task/meter.py")
PROGRAM = str(PROGRAMS / "jax_slow.py")


@pytest.mark.parametrize(("how", "reason"), [("input", "input pipeline (it waits "), ("callback", "own computation")])
def test_a_slow_process_is_named_with_the_reason(distlaunch: Distlaunch, tmp_path: Path, how: str, reason: str) -> None:
    ran = distlaunch("up", write_spec(tmp_path, PROGRAM, "1", how))
    assert ran.status == 0, ran.stderr
    [named] = [line for line in ran.stderr.splitlines() if "× the median step" in line]
    assert named.startswith("worker:1 takes ")
    assert f"reason: {reason}" in named


def test_equally_fast_processes_are_not_named(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("up", write_spec(tmp_path, PROGRAM, "9", "input"))
    assert ran.status == 0, ran.stderr
    assert "× the median step" not in ran.stderr
    assert b'"straggler"' not in (ran.directory / "events.jsonl").read_bytes()
