"""What the live view costs: the controller's processor time, bytes to the terminal, and the steps of the tasks."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import distlaunch_command
from tests.harness.terminals import Terminal

WATCH_S = 10.0
SHARE = Row("the controller while 8 tasks print 80 lines/s, with the live view", "`--no-live`")
STEPS = """
import hashlib, json, os, sys, time
from worker_entry import progress

data, times = b"x" * 3_000_000, []
for step in range(1, int(sys.argv[1]) + 1):
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    progress.report(step=step, loss=1 / step)
    times.append(time.perf_counter() - began)
    if step % 20 == 0:
        print("step", step, flush=True)
with open(f"{sys.argv[2]}/{os.environ['DISTLAUNCH_TASK']}", "w") as file:
    json.dump(times, file)
"""


def measure(runs: int) -> Iterator[Pair]:
    print("8 tasks that report 10 steps a second each, and print a line for each, on a terminal of 120 x 40")
    with_view, without = zip(*((_watch(), _watch("--no-live")) for _ in range(min(runs, 3))), strict=True)
    yield Pair("controller", [seen[0] for seen in with_view], [seen[0] for seen in without], "% of a core", SHARE)
    for title, side in (("live view", with_view), ("--no-live", without)):
        rate, frames = (statistics.median(values) for values in list(zip(*side, strict=True))[1:])
        print(f"  {title:<12} {rate / 1000:.1f} kB/s, {frames:.1f} pictures/s", flush=True)
    print("a step of two tasks that compute; rival: the same with --no-live (goal: ratio at most 1.01)")
    ours, rival = time_pairs(_time_step, lambda: _time_step("--no-live"), runs)
    yield Pair("step", [1000 * value for value in ours], [1000 * value for value in rival], "ms")


def _watch(*options: str) -> tuple[float, float, float]:
    """The controller's CPU in per cent of a core, bytes per second, and pictures per second."""
    with tempfile.TemporaryDirectory() as folder:
        program = [str(PROGRAMS / "live_steps.py"), f"{folder}/end", "0.1"]
        command = ["local", "-n", "8", "--run-dir", f"{folder}/run", *options, *program]
        terminal = Terminal(distlaunch_command(*command), columns=120, rows=40)
        try:
            terminal.shows("worker:7 does step 30")
            controller = json.loads(Path(folder, "run", "run.json").read_text())["controller"]["pid"]
            before, began, had = _cpu(controller), time.monotonic(), len(terminal.raw)
            while time.monotonic() < began + WATCH_S:
                terminal.read()
                time.sleep(0.01)
            took, written = time.monotonic() - began, terminal.raw[had:]
            used = _cpu(controller) - before
            Path(folder, "end").touch()
            terminal.end()
        finally:
            terminal.close()
    return 100 * used / took, len(written) / took, written.count(b"\x1b[?2026h") / took


def _cpu(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def _time_step(*options: str) -> float:
    """The median time of a step, over all tasks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "steps.py").write_text(STEPS)
        command = ["local", "-n", "2", "--run-dir", f"{folder}/run", *options, f"{folder}/steps.py", "600", folder]
        terminal = Terminal(distlaunch_command(*command), columns=120, rows=40)
        try:
            terminal.end()
        finally:
            terminal.close()
        tasks = ("worker:0", "worker:1")
        times: list[float] = [value for task in tasks for value in json.loads(Path(folder, task).read_text())]
        return statistics.median(times)
