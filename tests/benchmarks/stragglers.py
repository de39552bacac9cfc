"""Which worker is named as a straggler, and why: clusters of two, with nothing wrong or with one slowed on purpose.

`quota` needs control groups of version 1 and the right to make one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from launcher.gang.events import TaskStarted
from launcher.report.run_events import RunEvent, Straggler, parse_record
from worker_entry import demo

PROGRAM = """
import os, sys, time
slow = sys.argv[1] == os.environ["DISTLAUNCH_TASK"]
if sys.argv[2] == "pinned":
    os.sched_setaffinity(0, {int(os.environ["DISTLAUNCH_TASK"][-1])})
import keras, numpy as np, tensorflow as tf

def load_batch(number):
    time.sleep(0.15 * slow)  # every second step: the strategy halves the batches
    return np.full((4096, 64), number % 7 / 10, "float32")

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    hidden = [keras.layers.Dense(256, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

def load(number):
    return tf.ensure_shape(tf.numpy_function(load_batch, [number], tf.float32), (4096, 64)), tf.zeros((4096, 1))

data = tf.data.Dataset.range(1 << 40).map(load).with_options(options)
model.fit(data, epochs=10000, steps_per_epoch=100, verbose=0)
"""
TRAIN_S = 40.0
"""How long each cluster trains unless a straggler is named before."""
SLOW = "worker:1"
GROUPS = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Case:
    """`argv`: the program; `slow`: the task to be named, empty if none; `disturb`: gets worker:1's process id."""

    title: str
    argv: tuple[str, ...]
    slow: str
    disturb: Callable[[int], AbstractContextManager[None]]


def measure(runs: int) -> None:
    """Prints a line for each case."""
    print("which of two workers is named (goal: the slow one in 19 of 20 runs, and none in 20 clean ones)")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        for case in make_cases(program):
            named = [run_case(case) for _ in range(runs)]
            print_case(case, named)


def make_cases(program: Path) -> list[Case]:
    train = (str(Path(demo.__file__).with_name("train.py")), "--epochs", "100000")
    return [
        Case("clean", (str(program), "nobody", "free"), "", lambda _: contextlib.nullcontext()),
        Case("demo, two loaded cores", train, "", lambda _: busy(0, 1)),
        Case("sleep in the data", (str(program), SLOW, "free"), SLOW, lambda _: contextlib.nullcontext()),
        Case("three busy neighbours", (str(program), "nobody", "pinned"), SLOW, lambda _: busy(1, 1, 1)),
        Case("CPU quota", (str(program), "nobody", "free"), SLOW, lambda pid: quota(pid, 0.3)),
    ]


def print_case(case: Case, named: list[dict[str, str]]) -> None:
    right = sum(set(names) == ({case.slow} if case.slow else set()) for names in named)
    reasons = Counter(f"{task}: {reason}" for names in named for task, reason in names.items())
    said = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()) or "none"
    print(f"  {case.title:<24} right in {right} of {len(named)}; named: {said}", flush=True)


def run_case(case: Case, keep: Path | None = None) -> dict[str, str]:
    """The tasks that were named in one run, each with its reason; `keep`: the run's folder, to keep it."""
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        command = [
            sys.executable,
            "-m",
            "launcher",
            "local",
            "-n",
            "2",
            "--set",
            "timeouts.stop_grace_s=1",
            "--run-dir",
            str(folder),
        ]
        process = stack.enter_context(
            subprocess.Popen([*command, *case.argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        try:
            wait_for(lambda: steps_of(folder) > 0, process, 60)
            stack.enter_context(case.disturb(pid_of(folder, SLOW)))
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: bool(named_in(folder)), process, TRAIN_S)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        return named_in(folder)


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if process.poll() is not None:
            raise RuntimeError(f"distlaunch has ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def steps_of(folder: Path) -> int:
    samples = folder / "attempt-1" / "worker-1.samples.jsonl"
    return sum(b'"progress"' in line for line in samples.read_bytes().splitlines()) if samples.exists() else 0


def pid_of(folder: Path, task: str) -> int:
    return next(event.pid for event in events_of(folder) if isinstance(event, TaskStarted) and str(event.task) == task)


def named_in(folder: Path) -> dict[str, str]:
    return {
        str(event.task): event.reason for event in events_of(folder) if isinstance(event, Straggler) and event.reason
    }


def events_of(folder: Path) -> Iterator[RunEvent]:
    for line in (folder / "events.jsonl").read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and (record := parse_record(line)) is not None:
            yield record.event


@contextlib.contextmanager
def busy(*cores: int) -> Iterator[None]:
    """Runs a program that only computes on each of these cores.

    Each has its own session: the kernel may divide a core between sessions.
    """
    source = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", source, str(core)], start_new_session=True) for core in cores]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@contextlib.contextmanager
def quota(pid: int, cores: float) -> Iterator[None]:
    """Limits a process to so many cores."""
    group = GROUPS / f"distlaunch-test-{os.getpid()}"
    group.mkdir()
    try:
        period = int((group / "cpu.cfs_period_us").read_text())
        (group / "cpu.cfs_quota_us").write_text(str(int(period * cores)))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()
