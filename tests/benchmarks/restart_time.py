"""From the death of a worker to the first step of the next attempt, and what of it is which."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import PROGRAMS


def measure(runs: int) -> None:
    print("3 workers train, one is killed, all start again after a pause of 0 s; from its death to …")
    parts = [_restart() for _ in range(runs)]
    for title, values in zip(("nothing left", "the first step again"), zip(*parts, strict=True), strict=True):
        print(f"  {title:<24} {_show(values)} s", flush=True)


def _show(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _restart() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        program = f"{{script: {PROGRAMS / 'train_keras.py'}, args: [nobody, resume, '4']}}"
        spec.write_text(
            f"nodes: [{{host: local, tasks: {{worker: 3}}}}]\nrestart: {{pause_s: 0}}\nprogram: {program}\n"
        )
        command = [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", "run", str(spec)]
        faults = ["--chaos", "kill:worker:1@step=30"]
        subprocess.run([*command, *faults], cwd=folder, capture_output=True, check=True)
        first, second = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"]
    [died] = [task["ended"] for task in first["tasks"] if task["task"] == "worker:1"]
    return first["ended"] - died, max(task["progress"]["began"] for task in second["tasks"]) - died
