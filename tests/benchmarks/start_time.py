"""The time from the command to the last worker's first all-reduce, and the workers' memory; rivals: shell, torchrun.

With JAX: the time until all workers are connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row
from tests.harness.processes import jax

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
first = time.time()
for _ in range(10):
    step()
with open("/proc/self/smaps_rollup") as file:
    private = sum(int(line.split()[1]) for line in file if line.startswith("Private"))
step()  # no worker ends before all have read their memory
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(f"{first} {private / 1024}")
"""

TORCH = """
import os, sys, time
import torch.distributed as dist, torch
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(f"{time.time()} 0")
dist.destroy_process_group()
"""

JAX = """
import os, sys, time
import keras
keras.distribution.initialize()
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(f"{time.time()} 0")
"""
ON_JAX = ("--framework", "jax", "--python", jax.PYTHON)
BY_HAND = {
    1: "`python train.py`",
    2: "`TF_CONFIG=… python train.py &` twice",
    4: "`TF_CONFIG=… python train.py &` four times",
    8: "`TF_CONFIG=… python train.py &` eight times",
}
"""The rival with so many workers."""
STARTS = {
    workers: Row(f"start to first all-reduce, {workers} worker{'s'[: workers > 1]}", rival)
    for workers, rival in BY_HAND.items()
}
WHOLE = {
    workers: Row(f"start to end of the same program, {workers} worker{'s'[: workers > 1]}", BY_HAND[workers])
    for workers in (1, 4)
}
MEMORY = Row("private memory of each of 8 workers", BY_HAND[8])


@dataclass(frozen=True)
class Start:
    """Seconds until all workers have done their first all-reduce, and until the end of the command or of all workers.

    `private`: the mean private memory of a worker in MiB.
    """

    seconds: float
    private: float
    whole_s: float


def measure(runs: int) -> Iterator[Pair]:
    print("start to the first all-reduce of the last worker; rival: N plain `TF_CONFIG=… python train.py &`")
    alone = 0.0
    for workers, row in STARTS.items():
        ours, rival = [], []
        for _ in range(runs):
            ours.append(start_ours(workers))
            rival.append(start_plain(workers))
        yield from compare(workers, ours, rival, row, WHOLE.get(workers))
        alone = alone or statistics.median(seconds_of(ours))
        print(f"    {statistics.median(seconds_of(ours)) / alone:.2f} × distlaunch's single worker", flush=True)
        private = [[start.private for start in side] for side in (ours, rival)]
        yield Pair("    private memory", private[0], private[1], "MiB", MEMORY if workers == 8 else None)
    _measure_torch(runs)
    yield from _measure_jax(runs)


def compare(workers: int, ours: Sequence[Start], rival: Sequence[Start], row: Row, whole: Row | None) -> Iterator[Pair]:
    """Yields the pair of the first all-reduces, and that of the whole runs, with their rows."""
    yield Pair(f"{workers} worker{'s'[: workers > 1]}", seconds_of(ours), seconds_of(rival), row=row)
    yield Pair("    to the end", [each.whole_s for each in ours], [each.whole_s for each in rival], row=whole)


def _measure_jax(runs: int) -> Iterator[Pair]:
    if not jax.has_jax():
        print("  no Python with JAX, Keras and TensorFlow: name it in DISTLAUNCH_JAX_PYTHON")
        return
    print("Keras on JAX, start to the connection of the last worker; rival: N plain `KERAS_…=… python train.py &`")
    for workers in (2, 4):
        forked, unforked, rival = [], [], []
        for _ in range(runs):
            forked.append(start_ours(workers, *ON_JAX, source=JAX))
            unforked.append(start_ours(workers, *ON_JAX, "--set", "preload=false", source=JAX))
            rival.append(_start_plain_jax(workers))
        yield Pair(f"{workers} workers", seconds_of(forked), seconds_of(rival))
        yield Pair("    preload: false", seconds_of(unforked), seconds_of(rival))


def _measure_torch(runs: int) -> None:
    if shutil.which("torchrun") is None:
        print("  no torchrun on PATH")
        return
    for workers in (2, 4, 8):
        seconds = [_torchrun(workers).seconds for _ in range(runs)]
        print(f"  torchrun, gloo, {workers:>2} workers  {statistics.median(seconds):.2f} s", flush=True)


def _torchrun(workers: int) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        program, steps = _write(Path(folder), TORCH)
        started = time.time()
        command = ["torchrun", "--standalone", f"--nproc_per_node={workers}"]
        subprocess.run([*command, str(program), str(steps)], check=True, capture_output=True)
        return _last_step(steps, workers, started)


def seconds_of(starts: Sequence[Start]) -> list[float]:
    return [start.seconds for start in starts]


def start_ours(workers: int, *options: str, source: str = PROGRAM) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        program, steps = _write(Path(folder), source)
        started = time.time()
        command = [sys.executable, "-m", "launcher", "local", "-n", str(workers), "--run-dir", f"{folder}/run"]
        subprocess.run([*command, *options, str(program), str(steps)], check=True, capture_output=True)
        return _last_step(steps, workers, started)


def start_plain(workers: int) -> Start:
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]

    def make_env(index: int) -> dict[str, str]:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        return {"TF_CONFIG": json.dumps(config)} if workers > 1 else {}

    return _start_by_hand(workers, sys.executable, PROGRAM, make_env)


def _start_plain_jax(workers: int) -> Start:
    [port] = _free_ports(1)

    def make_env(index: int) -> dict[str, str]:
        return {
            "KERAS_BACKEND": "jax",
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(workers),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
        }

    return _start_by_hand(workers, jax.PYTHON, JAX, make_env)


def _start_by_hand(workers: int, python: str, source: str, make_env: Callable[[int], dict[str, str]]) -> Start:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        program, steps = _write(Path(folder), source)
        started = time.time()
        processes = []
        for index in range(workers):
            log = stack.enter_context((Path(folder) / f"{index}.log").open("wb"))
            argv = [python, str(program), str(steps)]
            env = {**os.environ, **make_env(index)}
            processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log))
        assert [process.wait() for process in processes] == [0] * workers
        return _last_step(steps, workers, started)


def _write(folder: Path, source: str) -> tuple[Path, Path]:
    program, steps = folder / "train.py", folder / "steps"
    program.write_text(source)
    steps.mkdir()
    return program, steps


def _last_step(steps: Path, workers: int, started: float) -> Start:
    told = [[float(word) for word in path.read_text().split()] for path in steps.iterdir()]
    assert len(told) == workers
    seconds = max(first for first, _ in told) - started
    return Start(seconds, statistics.mean(private for _, private in told), time.time() - started)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [held.getsockname()[1] for held in sockets]
