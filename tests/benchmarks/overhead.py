"""distlaunch's own CPU time and memory: while eight workers train, and for a thousand tasks that do nothing."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.harness.places import PROGRAMS

WATCH_S = 10.0


def measure(runs: int) -> None:
    shares = [_train() for _ in range(min(runs, 3))]
    print("8 workers train; CPU of controller, and of agent and guardian, in per cent of a core (goal: 1 % together)")
    for title, values in zip(
        ("controller", "agent", "forkserver, private MiB"), zip(*shares, strict=True), strict=True
    ):
        print(f"  {title:<24} {statistics.median(values):.2f}", flush=True)
    print("1,000 tasks that do nothing in one run")
    started, took, memory, left = _thousand()
    print(f"  all started after {started:.1f} s, all ended after {took:.1f} s; at most {memory:.0f} MiB; {left} left")


def _train() -> tuple[float, float, float]:
    """CPU of controller, and of agent and guardian, in per cent of a core; the forkserver's private memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        program = [str(PROGRAMS / "train_keras.py"), "nobody", "x", "2000"]
        command = [sys.executable, "-m", "launcher", "local", "-n", "8", "--run-dir", "run", "--max-restarts", "1"]
        with subprocess.Popen(
            [*command, *program], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            status = Path(folder) / "run" / "attempt-1" / "worker-7.status.json"
            while not (status.exists() and '"first_step": 1' in status.read_text()):
                time.sleep(0.1)
            time.sleep(2)
            controller = psutil.Process(process.pid)
            [guardian] = controller.children()
            [agent] = guardian.children()
            forkserver = min(agent.children(), key=lambda child: child.pid)
            ours = [[controller], [guardian, agent]]
            before = [_cpu(group) for group in ours]
            time.sleep(WATCH_S)
            after = [_cpu(group) for group in ours]
            rollup = Path(f"/proc/{forkserver.pid}/smaps_rollup").read_text()
            private = int(rollup.split("Private_Dirty:")[1].split()[0]) / 1024
            process.terminate()
    one, other = (100 * (late - early) / WATCH_S for early, late in zip(before, after, strict=True))
    return one, other, private


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _thousand() -> tuple[float, float, float, int]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [sys.executable, "-m", "launcher", "local", "-n", "1000", "--oversubscribe", "--run-dir", "run"]
        memory = 0.0
        with subprocess.Popen(
            [*command, "--", "true"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            controller = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    ours = [controller, *controller.children()]
                    ours += [agent for guardian in ours[1:] for agent in guardian.children()]
                    memory = max(memory, sum(each.memory_full_info().uss for each in ours) / (1 << 20))
                except psutil.NoSuchProcess:
                    pass
                time.sleep(0.2)
        assert process.returncode == 0
        [attempt] = json.loads((Path(folder) / "run" / "report.json").read_text())["attempts"]
    started = max(task["started"] for task in attempt["tasks"])
    return started - began, attempt["ended"] - began, memory, attempt["processes_left"]
