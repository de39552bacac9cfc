"""The time from the death of a worker to the first step of the next attempt, split into phases."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row
from tests.harness.places import PROGRAMS

FIRST_STEP = Row("death of one of 3 workers to the next first step", "`preload: false`")


def measure(runs: int) -> Iterator[Pair]:
    print("3 workers train, one is killed, all are restarted; rival: preload: false; from the death to …")
    ours, rival = [], []
    for _ in range(runs):
        ours.append(_restart())
        rival.append(_restart("--set", "preload=false"))
    phases = {"nothing left": None, "the cluster is up again": None, "the first step again": FIRST_STEP}
    for number, (title, row) in enumerate(phases.items()):
        yield Pair(title, [parts[number] for parts in ours], [parts[number] for parts in rival], row=row)
    print("rival: from the command to the first step of the first attempt; from the death to …")
    yield Pair("the first step again", [parts[2] for parts in ours], [parts[3] for parts in ours])


def _restart(*options: str) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        program = f"{{script: {PROGRAMS / 'train_keras.py'}, args: [nobody, resume, '4']}}"
        spec.write_text(f"nodes: [{{host: local, tasks: {{worker: 3}}}}]\nprogram: {program}\n")
        command = [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", "run", str(spec)]
        faults = ["--chaos", "kill:worker:1@step=30", *options]
        began = time.time()
        subprocess.run([*command, *faults], cwd=folder, capture_output=True, check=True)
        first, second = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"]
    [died] = [task["ended"] for task in first["tasks"] if task["task"] == "worker:1"]
    # A task that is stopped right after its first steps may not have reported them.
    begins = [[t["progress"]["began"] for t in attempt["tasks"] if t["progress"]] for attempt in (first, second)]
    cold, again = (max(begin) for begin in begins)
    return first["ended"] - died, second["cluster_up"] - died, again - died, cold - began
