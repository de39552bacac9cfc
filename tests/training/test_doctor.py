"""`distlaunch doctor`: the facts that it finds, and what it reports about them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.harness.processes.doctor import run

COVERS = (
    "launcher/cli/doctor.py",
    "launcher/commands/doctor.py",
    "launcher/report/doctor.py",
    "launcher/report/check_report.py",
    "launcher/controller/preview.py",
    "worker_entry/system/features.py",
    "worker_entry/agent/checks",
)


def test_doctor_reports_gpus_that_tensorflow_does_not_see_as_an_error(tmp_path: Path) -> None:
    answer = 'case "$1" in *driver*) echo 550.54 ;; *memory*) echo 0, 3, 24576 ;; *) echo 0 ;; esac'
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    status, report = run(env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    [line] = [line for line in report["lines"] if line["level"] == "error"]
    assert (status, line["subject"]) == (3, "GPUs")
    assert line["message"] == "1 GPU, driver 550.54, but TensorFlow sees none of them"
