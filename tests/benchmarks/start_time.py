"""From the command to the first training step of the last worker, against plain `TF_CONFIG=… python train.py &`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.pairs import print_pair, time_pairs

PROGRAM = """
import os, sys, time
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(1.0)

@tf.function
def step():
    def one():
        with tf.GradientTape() as tape:
            loss = weight * weight
        gradient = tape.gradient(loss, weight)
        gradient = tf.distribute.get_replica_context().all_reduce("sum", gradient)
        return gradient
    return strategy.run(one)

step()
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(str(time.time()))
"""


def measure(runs: int) -> None:
    print("start to first step; rival: N plain `TF_CONFIG=… python train.py &` (goal: difference at most 1 s)")
    for workers in (1, 2, 4):
        ours, rival = time_pairs(lambda n=workers: _ours(n), lambda n=workers: _plain(n), runs)  # type: ignore[misc]
        print_pair(f"{workers} workers", ours, rival)


def _ours(workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program, steps = _write(Path(folder))
        started = time.time()
        command = [sys.executable, "-m", "launcher", "local", "-n", str(workers), "--run-dir", f"{folder}/run"]
        subprocess.run([*command, str(program), str(steps)], check=True, capture_output=True)
        return _last_step(steps, workers) - started


def _plain(workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        program, steps = _write(Path(folder))
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
        started = time.time()
        processes = []
        for index in range(workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            env = {**os.environ, **({"TF_CONFIG": json.dumps(config)} if workers > 1 else {})}
            log = stack.enter_context((Path(folder) / f"{index}.log").open("wb"))
            argv = [sys.executable, str(program), str(steps)]
            processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))
        assert [process.wait() for process in processes] == [0] * workers
        return _last_step(steps, workers) - started


def _write(folder: Path) -> tuple[Path, Path]:
    program, steps = folder / "train.py", folder / "steps"
    program.write_text(PROGRAM)
    steps.mkdir()
    return program, steps


def _last_step(steps: Path, workers: int) -> float:
    times = [float(path.read_text()) for path in steps.iterdir()]
    assert len(times) == workers
    return max(times)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [held.getsockname()[1] for held in sockets]
