"""How often a verdict names the task that broke a cluster of three, and its class, though peers' errors come first."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.processes.failing_runs import FAIL, WAYS

RACY = ("kill", "segfault", "os-exit", "raise", "raise-in-map", "raise-in-thread", "exit-text", "exit-0")


def measure(runs: int) -> None:
    print("3 workers train, one fails: verdicts that name it and its class; from its failure until nothing is left")
    right = 0
    for how in RACY:
        seconds = []
        for number in range(runs):
            took = _fail(how, f"worker:{number % 2}")
            seconds += [] if took is None else [took]
        right += len(seconds)
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) s" if seconds else ""
        print(f"  {how:<16} {len(seconds):>3} of {runs:>3}   {spread}", flush=True)
    print(f"  {'all':<16} {right:>3} of {runs * len(RACY):>3}")


def _fail(how: str, culprit: str) -> float | None:
    """Seconds until everything was gone; None if the verdict was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", "local", "-n", "3", "--run-dir", "run", FAIL, culprit, how]
        subprocess.run(command, cwd=folder, capture_output=True, check=False)
        attempt = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"][0]
    verdict = attempt["verdict"]
    if (verdict["task"], verdict["reference"]) != (culprit, WAYS[how][0]) or attempt["processes_left"]:
        return None
    [task] = [task for task in attempt["tasks"] if task["task"] == culprit]
    crash = task["crash"]
    failed = crash["time"] if crash is not None and crash["thread"] is None else task["ended"]
    return float(attempt["ended"] - failed)
