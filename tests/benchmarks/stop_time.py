"""From the death of one worker to everything gone, in a cluster of plain processes and in one that trains."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = """
import os, signal, time
if os.environ["DISTLAUNCH_TASK"] == "worker:1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
TRAINING = """
import os, signal
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))
for number in range(10_000_000):
    step()
    if number == 100 and os.environ["DISTLAUNCH_TASK"] == "worker:1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def measure(runs: int) -> None:
    print("SIGKILL of worker:1 of 3 to nothing left (TensorFlow ignores TERM: its share has 2 s of grace)")
    for title, program in (("tasks that heed TERM", PLAIN), ("training", TRAINING)):
        seconds = [_stop(program) for _ in range(runs)]
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"  {title:<24} {statistics.median(seconds):8.3f} ({spread}) s", flush=True)


def _stop(program: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(program)
        command = [sys.executable, "-m", "launcher", "local", "-n", "3", "--run-dir", "run", "train.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        assert done.returncode == 1, done.stderr
        attempt = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"][0]
        died = min(task["ended"] for task in attempt["tasks"])
        assert attempt["processes_left"] == 0
        return float(attempt["ended"] - died)
