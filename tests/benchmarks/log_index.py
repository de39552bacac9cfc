"""The cost of the index beside a log, for a task that prints a gigabyte; rival: distlaunch without an index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.log_throughput import PROGRAM
from tests.benchmarks.pairs import Pair, time_pairs
from tests.harness.places import ROOT

MEGABYTES = 1000
WITHOUT = "\n\nTaskLog.observe = lambda self, *, last=False: None\n"


def measure(runs: int) -> Iterator[Pair]:
    print(f"1 worker prints {MEGABYTES} MB in lines of 100 bytes, 10 at once; rival: without an index")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("launcher", "worker_entry"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        with (Path(folder) / "worker_entry/agent/tasks/log.py").open("a") as module:
            module.write(WITHOUT)
        ours, rival = time_pairs(lambda: _run(ROOT), lambda: _run(Path(folder)), runs)
        yield Pair("wall time to print", ours, rival)


def _run(tree: Path) -> float:
    """Seconds from the first byte to the last, with the distlaunch in `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        program, times = Path(folder) / "chatty.py", Path(folder) / "times"
        program.write_text(PROGRAM)
        times.mkdir()
        command = [sys.executable, "-m", "launcher", "local", "-n", "1", "--run-dir", f"{folder}/run", "--"]
        subprocess.run(
            [*command, sys.executable, str(program), str(times), str(MEGABYTES), "10"],
            cwd=tree,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        index = Path(folder) / "run/attempt-1/worker-0.log.index"
        assert bool(index.stat().st_size) is (tree == ROOT)
        begin, end = map(float, next(times.iterdir()).read_text().split())
        return end - begin
