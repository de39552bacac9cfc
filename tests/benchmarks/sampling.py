"""What it costs to measure eight tasks of 120 threads that compute: per sample, and for the agent as a whole."""

from __future__ import annotations

import contextlib
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from tests.benchmarks.pairs import Pair, Row, time_pairs
from worker_entry.agent.gpus.watch import GpuWatch
from worker_entry.agent.tasks.sampling import Sampler
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.framing import encode

TASKS = 8
THREADS = 120
"""As many as a TensorFlow worker has on two cores; most of them never run."""
SAMPLE_S = 2.0
WATCH_S = 20.0
PAUSE_S = 0.3
"""Between two samples, so that other processes have used the processor's caches meanwhile."""
PROGRAM = f"""
import threading, time
from worker_entry import progress
def compute():
    while True:
        sum(range(10_000))
        time.sleep(0.04)
for _ in range({THREADS - 9}):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
for _ in range(8):
    threading.Thread(target=compute, daemon=True).start()
print("up", flush=True)
for step in range(1_000_000):
    progress.report(step=step, loss=0.5)
    time.sleep(0.02)
"""
SAMPLE = Row(f"CPU time of a sample of {TASKS} tasks with {THREADS} threads each", "psutil")


def measure(runs: int) -> Iterator[Pair]:
    with _tasks() as pids:
        ours, rival = _make_sampler(pids), _make_rival(pids)
        mine, theirs = time_pairs(lambda: _cost(ours), lambda: _cost(rival), max(10 * runs, 30))
    print(f"a sample of {TASKS} tasks of {THREADS} threads; rival: psutil, and open() for what psutil lacks; CPU time")
    yield Pair("sample", [1e3 * seconds for seconds in mine], [1e3 * seconds for seconds in theirs], "ms", SAMPLE)
    share = statistics.mean(mine) / SAMPLE_S
    print(f"  of a core, every {SAMPLE_S:g} s     {share:.3%} (goal: 0.2 %)")
    print(f"agent and guardian of {TASKS} such tasks; rival: sample_every_s: 0; CPU in per cent of a core")
    mine, theirs = time_pairs(lambda: _run(SAMPLE_S), lambda: _run(0), runs)
    yield Pair("agent", mine, theirs, "%")


def _cost(take: Callable[[], object]) -> float:
    time.sleep(PAUSE_S)
    began = time.thread_time()
    take()
    return time.thread_time() - began


@contextlib.contextmanager
def _tasks() -> Iterator[list[int]]:
    command = [sys.executable, "-c", PROGRAM]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(TASKS)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _make_sampler(pids: list[int]) -> Callable[[], object]:
    """What the agent does for a sample until the sample is ready to be sent."""
    sampler, now = Sampler(GpuWatch(selectors.DefaultSelector())), 0.0
    tasks = {f"worker:{index}": SimpleNamespace(pid=pid, running=True) for index, pid in enumerate(pids)}

    def take() -> bytes:
        nonlocal now
        sampled = None
        while sampled is None:  # an expensive sample delays the next
            now += SAMPLE_S
            sampled = sampler.poll(cast("Mapping[str, StartedTask]", tasks), now, SAMPLE_S)
        return encode(sampled)

    return take


def _make_rival(pids: list[int]) -> Callable[[], object]:
    """The same by psutil, which is asked for the tasks' child processes as often as the agent looks for them."""
    processes, count = [psutil.Process(pid) for pid in pids], 0

    def take() -> list[Any]:
        nonlocal count
        found: list[Any] = [psutil.cpu_times(), psutil.virtual_memory(), psutil.net_io_counters()]
        for process in processes:
            if count % 10 == 0:
                found.append(process.children(recursive=True))
            with process.oneshot():
                found += [process.cpu_times(), process.memory_info(), process.num_threads(), process.io_counters()]
            for thread in process.threads():
                text = Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text(encoding="ascii")
                found.append(int(text.split()[1]))
        count += 1
        return found

    return take


def _run(sample_s: float) -> float:
    """CPU time of agent and guardian in per cent of a core."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM)
        command = [sys.executable, "-m", "launcher", "local", "-n", str(TASKS), "--run-dir", "run", "--oversubscribe"]
        with subprocess.Popen(
            [*command, "--set", f"sample_every_s={sample_s}", "train.py"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            attempt = Path(folder) / "run" / "attempt-1"
            while sum(b"up" in log.read_bytes() for log in attempt.glob("worker-*.log")) < TASKS:
                time.sleep(0.1)
            time.sleep(2)
            [guardian] = psutil.Process(process.pid).children()
            [agent] = guardian.children()
            before = _ran_s(agent.pid) + _ran_s(guardian.pid)
            time.sleep(WATCH_S)
            after = _ran_s(agent.pid) + _ran_s(guardian.pid)
            process.terminate()
    return 100 * (after - before) / WATCH_S


def _ran_s(pid: int) -> float:
    """CPU seconds of a process with one thread; psutil only has hundredths."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9
