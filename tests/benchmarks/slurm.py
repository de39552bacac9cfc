"""Runs in a Slurm job: their start, and many nodes, against the same `srun` by hand."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.guards import PROGRAM
from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.harness.hosts.slurm import SlurmCluster, running_slurm

BY_HAND = """
import json, os, sys
rank = int(os.environ["SLURM_PROCID"])
addresses = json.loads(sys.argv[1])
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
os.environ["DISTLAUNCH_TASK"] = f"worker:{rank}"
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
START = Row("start to first all-reduce, 2 workers on 2 nodes of Slurm", "`srun python train.py`")
MANY = {
    nodes: Row(f"`true` on {nodes} nodes of Slurm, with all slurmds on the same cores", "`srun true`")
    for nodes in (64, 128, 256)
}
"""64 nodes get a step each; more get one step for all."""


@dataclass(frozen=True)
class Shape:
    """A job's nodes, and the tasks on each of them."""

    nodes: int
    per_node: int

    @property
    def tasks(self) -> int:
        return self.nodes * self.per_node

    @property
    def options(self) -> list[str]:
        """The same as options of Slurm."""
        return [f"-N{self.nodes}", f"-n{self.tasks}", f"--ntasks-per-node={self.per_node}"]


def measure(runs: int) -> Iterator[Pair]:
    """Yields a pair for each number of nodes; needs root and Slurm's daemons."""
    print("start to the last worker's first all-reduce, in a job; rival: `srun python train.py`, TF_CONFIG by hand")
    with _cluster(8) as cluster:
        for shape in (Shape(2, 1), Shape(2, 2), Shape(2, 4), Shape(4, 1), Shape(8, 1)):
            with _job(cluster, shape) as env:
                ours, rival = time_pairs(
                    lambda shape=shape, env=env: _start(cluster, shape, env, _ours),  # type: ignore[misc]
                    lambda shape=shape, env=env: _start(cluster, shape, env, _by_hand),  # type: ignore[misc]
                    runs,
                )
            row = START if shape == Shape(2, 1) else None
            yield Pair(f"{shape.nodes} nodes, {shape.tasks} tasks", ours, rival, row=row)
    print("`true` on many nodes, from the command to its end; rival: `srun true`")
    for nodes, many in MANY.items():
        with _cluster(nodes) as cluster, _job(cluster, Shape(nodes, 1)) as env:
            peaks: list[int] = []
            ours, rival = time_pairs(
                lambda env=env, peaks=peaks: _time_true(env, peaks),  # type: ignore[misc]
                lambda nodes=nodes, env=env: _time(["srun", f"-N{nodes}", f"-n{nodes}", "true"], env, []),  # type: ignore[misc]
                min(runs, 3),
            )
            yield Pair(f"{nodes} nodes", ours, rival, row=many)
            print(f"  peak RSS of the controller {max(peaks) / 2**20:.0f} MiB", flush=True)


@contextlib.contextmanager
def _cluster(nodes: int) -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory() as folder, running_slurm(Path(folder), nodes) as cluster:
        yield cluster


@contextlib.contextmanager
def _job(cluster: SlurmCluster, shape: Shape) -> Iterator[dict[str, str]]:
    cluster.run("salloc", "--no-shell", *shape.options, timeout=120)
    job = cluster.run("squeue", "-h", "-o", "%i").split()[0]
    try:
        tasks = f"{shape.per_node}(x{shape.nodes})"  # as salloc sets it for the command that it starts
        yield {**os.environ, **cluster.env, "SLURM_JOB_ID": job, "SLURM_TASKS_PER_NODE": tasks}
    finally:
        cluster.run("scancel", job)
        cluster.await_idle()


def _start(
    cluster: SlurmCluster,
    shape: Shape,
    env: dict[str, str],
    command: Callable[[SlurmCluster, Shape, Path, Sequence[str]], list[str]],
) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program, answers = Path(folder) / "train.py", Path(folder) / "answers"
        program.write_text(PROGRAM)
        answers.mkdir()
        began = time.time()
        words = command(cluster, shape, Path(folder), [str(program), str(answers), "4", "1"])
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = [json.loads(path.read_text()) for path in answers.glob("worker:*")]
        assert len(found) == shape.tasks
        return float(max(answer["first"] for answer in found)) - began


def _ours(_: SlurmCluster, __: Shape, folder: Path, words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "launcher", "up", "--run-dir", str(folder / "run"), "--slurm", *words]


def _by_hand(cluster: SlurmCluster, shape: Shape, _: Path, words: Sequence[str]) -> list[str]:
    addresses = [f"{cluster.address(rank // shape.per_node)}:{21000 + rank}" for rank in range(shape.tasks)]
    srun = ["srun", "--overlap", *shape.options, sys.executable, "-c", BY_HAND]
    return [*srun, json.dumps(addresses), *words]


def _time_true(env: dict[str, str], peaks: list[int]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        up = [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", f"{folder}/run", "--slurm"]
        return _time([*up, "--", "true"], env, peaks)


def _time(words: Sequence[str], env: dict[str, str], peaks: list[int]) -> float:
    began = time.perf_counter()
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            peak = max(peak, psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.05)
    peaks.append(peak)
    assert process.returncode == 0
    return time.perf_counter() - began
