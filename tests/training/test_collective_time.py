"""A program with deterministic operations computes the same bits with and without progress reports."""

from __future__ import annotations

from pathlib import Path

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/hooks",)

PROGRAM = str(PROGRAMS / "deterministic.py")


def test_deterministic_training_is_bitwise_equal_with_and_without_progress_reports(
    distlaunch: Distlaunch, warm: Distlaunch, tmp_path: Path
) -> None:
    """Runs three clusters of a few seconds each: the only reference for a run is another run."""
    weights = []
    for number, (run, options, arguments, env) in enumerate(
        [
            (warm, ["--set", "progress=false"], ["call"], {}),
            (warm, [], ["call"], {}),
            (distlaunch, [], [], {"TF_DETERMINISTIC_OPS": "1"}),  # which TensorFlow reads when it is imported
        ]
    ):
        place = ["--run-dir", str(tmp_path / str(number))]
        ran = run("local", "--workers", "2", *place, *options, PROGRAM, *arguments, env=env, run_dir=False)
        assert ran.status == 0, ran.stderr
        for worker in (0, 1):
            log = (tmp_path / str(number) / "attempt-1" / f"worker-{worker}.log").read_text()
            weights.append(next(line for line in log.splitlines() if line.startswith("weights ")))
    assert weights == [weights[0]] * 6
