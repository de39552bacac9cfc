"""From the death of one worker until nothing is left, on this machine and over SSH, plain processes and training."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.hosts.sshd import QUIET, running_hosts

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
    print("SIGKILL of worker:1 until nothing is left anywhere (TensorFlow ignores TERM: 2 s of its time are grace)")
    for title, program in (("tasks that end on TERM", PLAIN), ("training", TRAINING)):
        _print(f"3 on this machine, {title}", [_stop_here(program) for _ in range(runs)])
        _print(f"2 over SSH, {title}", [_stop_there(program) for _ in range(runs)])


def _print(title: str, seconds: Sequence[float]) -> None:
    print(f"  {title:<40} {statistics.median(seconds):8.3f} ({min(seconds):.2f} to {max(seconds):.2f}) s", flush=True)


def _stop_here(program: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(program)
        return _stop(folder, ["local", "-n", "3", "--run-dir", "run", "train.py"], {})


def _stop_there(program: str) -> float:
    """One worker on each of two nodes."""
    with tempfile.TemporaryDirectory() as folder, running_hosts(Path(folder), QUIET) as hosts:
        hosts.trust()
        (Path(folder) / "train.py").write_text(program)
        return _stop(folder, ["up", "--run-dir", "run", hosts.write_spec("program: {script: train.py}\n")], hosts.env)


def _stop(folder: str, arguments: Sequence[str], env: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "launcher", *arguments]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    attempt = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"][0]
    died = min(task["ended"] for task in attempt["tasks"])
    assert attempt["processes_left"] == 0
    return float(attempt["ended"] - died)
