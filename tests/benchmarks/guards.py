"""The cost of guarded ports and of a tunnel: the start of a cluster, and the throughput of its all-reduces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row
from tests.harness.hosts.namespaces import running_network

PROGRAM = """
import json, os, sys, time
import tensorflow as tf
experimental = tf.distribute.experimental
ring = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
folder, size, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

@tf.function
def reduce(value):
    return strategy.reduce("SUM", strategy.run(lambda: tf.identity(value)), axis=None)

began = time.time()
reduce(tf.zeros([1])).numpy()
first = time.time()
value = tf.zeros([size >> 2])
reduce(value)
started = time.perf_counter()
for _ in range(times):
    reduce(value).numpy()
seconds = time.perf_counter() - started
with open(os.path.join(folder, os.environ["DISTLAUNCH_TASK"]), "w") as file:
    json.dump({"first": first, "mb_s": size * times / max(seconds, 1e-9) / 1e6}, file)
"""
SIZE, TIMES = 16 << 20, 30
STARTS = {
    workers: Row(f"start to first all-reduce with guarded ports, {workers} workers", "`guard: off`")
    for workers in (2, 4, 8)
}
REDUCED = Row(f"all-reduces of {SIZE >> 20} MiB on 2 workers, guarded", "`guard: off`")
TUNNEL_START = Row("start to first all-reduce through `isolation: tunnel`, 2 nodes", "`isolation: none`")
TUNNEL_REDUCED = Row(
    f"all-reduces of {SIZE >> 20} MiB through `isolation: tunnel`, with both nodes on the same cores",
    "`isolation: none`",
)


@dataclass(frozen=True)
class Ran:
    """Seconds from the command to the last worker's first all-reduce; MB/s that the slowest worker reduced."""

    start_s: float
    mb_s: float


def measure(runs: int) -> Iterator[Pair]:
    """Yields pairs for each cluster size, and for the tunnel; the tunnel needs root and sshd."""
    print("start to the last worker's first all-reduce, with guarded ports; rival: `guard: off` (goal: 1.02)")
    for workers, row in STARTS.items():
        times = TIMES if workers == 2 else 1
        ours, rival = _pairs(
            runs,
            lambda workers=workers, times=times: _run_local(workers, "auto", times),  # type: ignore[misc]
            lambda workers=workers, times=times: _run_local(workers, "off", times),  # type: ignore[misc]
        )
        yield Pair(f"{workers} workers", [ran.start_s for ran in ours], [ran.start_s for ran in rival], row=row)
        if workers == 2:
            yield Pair("    all-reduce", [ran.mb_s for ran in ours], [ran.mb_s for ran in rival], "MB/s", REDUCED)
    print("two machines, `isolation: tunnel`; rival: none")
    with tempfile.TemporaryDirectory() as folder, running_network(Path(folder)) as network:
        program = f"program: {{script: {folder}/train.py}}\nworking_directory: {folder}\n"

        def run(isolation: str) -> Ran:
            spec = network.write_spec(f"isolation: {isolation}\n{program}", ["gpu-a", "gpu-b"])
            return _run(lambda command: network.run(command, timeout=300), ["up"], [spec], Path(folder), workers=2)

        ours, rival = _pairs(runs, lambda: run("tunnel"), lambda: run("none"))
        yield Pair("start", [ran.start_s for ran in ours], [ran.start_s for ran in rival], row=TUNNEL_START)
        yield Pair("all-reduce", [ran.mb_s for ran in ours], [ran.mb_s for ran in rival], "MB/s", TUNNEL_REDUCED)


def _pairs(runs: int, ours: Callable[[], Ran], rival: Callable[[], Ran]) -> tuple[list[Ran], list[Ran]]:
    """Runs both in turn; the side that goes first alternates."""
    mine: list[Ran] = []
    theirs: list[Ran] = []
    for number in range(runs):
        for side in (ours, rival) if number % 2 else (rival, ours):
            (mine if side is ours else theirs).append(side())
    return mine, theirs


def _run_local(workers: int, guard: str, times: int) -> Ran:
    def run(command: Sequence[str]) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory() as folder:
        options = ["local", "-n", str(workers), "--set", f"guard={guard}"]
        return _run(run, options, [f"{folder}/train.py"], Path(folder), workers=workers, times=times)


def _run(
    run: Callable[[Sequence[str]], object],
    options: Sequence[str],
    what: Sequence[str],
    folder: Path,
    *,
    workers: int,
    times: int = TIMES,
) -> Ran:
    (folder / "train.py").write_text(PROGRAM)
    answers = folder / f"answers-{time.monotonic_ns()}"
    answers.mkdir()
    began = time.time()
    command = [sys.executable, "-m", "launcher", *options, "--run-dir", str(answers / "run"), *what]
    run([*command, str(answers), str(SIZE), str(times)])
    found = [json.loads(path.read_text()) for path in answers.glob("worker:*")]
    assert len(found) == workers
    return Ran(max(answer["first"] for answer in found) - began, min(answer["mb_s"] for answer in found))
