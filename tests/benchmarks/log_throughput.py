"""Two workers print as fast as they can; rival: the same program twice, with its output redirected to a file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.benchmarks.peaks import PAUSE_S, peak_rss

PROGRAM = """
import os, sys, time
megabytes, lines_at_once = int(sys.argv[2]), int(sys.argv[3])
block = (b"x" * 99 + b"\\n") * lines_at_once
started = time.time()
for _ in range(megabytes * 1_000_000 // len(block)):
    os.write(1, block)
with open(sys.argv[1] + "/" + str(os.getpid()), "w") as file:
    file.write(f"{started} {time.time()}")
"""
LINES = Row("two workers printing line by line", "`python chatty.py > file &` twice")
LOADS = {"64 kB at once": (200, 640, None), "line by line": (50, 1, LINES)}
"""Megabytes that each worker prints, and lines of 100 bytes that it writes with one call."""


def measure(runs: int) -> Iterator[Pair]:
    print("2 workers print at once; rival: `python chatty.py > file &` twice")
    for title, (megabytes, lines, row) in LOADS.items():
        arguments = [str(megabytes), str(lines)]
        peaks: list[tuple[int, int]] = []
        ours, rival = time_pairs(lambda a=arguments, p=peaks: _ours(a, p), lambda a=arguments: _plain(a), runs)  # type: ignore[misc]
        yield Pair(title, [2 * megabytes / s for s in ours], [2 * megabytes / s for s in rival], "MB/s", row)
        controller, agents = (max(column) / 2**20 for column in zip(*peaks, strict=True))
        print(f"  peak RSS: controller {controller:.0f} MiB, agent and guardian together {agents:.0f} MiB", flush=True)


def _ours(arguments: list[str], peaks: list[tuple[int, int]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program, times = _write(Path(folder))
        command = [sys.executable, "-m", "launcher", "local", "-n", "2", "--run-dir", f"{folder}/run"]
        with (Path(folder) / "console").open("wb") as console:
            process = subprocess.Popen([*command, str(program), str(times), *arguments], stdout=console, stderr=console)
            peak = [0, 0]
            watch = threading.Thread(target=_watch, args=(process, peak))
            watch.start()
            assert process.wait() == 0
            watch.join()
        peaks.append((peak[0], peak[1]))
        return _seconds(times)


def _plain(arguments: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program, times = _write(Path(folder))
        processes = []
        for index in range(2):
            with (Path(folder) / f"{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen([sys.executable, str(program), str(times), *arguments], stdout=log, stderr=log)
                )
        assert [process.wait() for process in processes] == [0, 0]
        return _seconds(times)


def _watch(process: subprocess.Popen[bytes], peak: list[int]) -> None:
    controller = psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            agents = [p.pid for p in controller.children(recursive=True) if p.cmdline()[-1:] == ["agent"]]
            peak[0] = max(peak[0], peak_rss([process.pid]))
            peak[1] = max(peak[1], peak_rss(agents))
        time.sleep(PAUSE_S)


def _write(folder: Path) -> tuple[Path, Path]:
    program, times = folder / "chatty.py", folder / "times"
    program.write_text(PROGRAM)
    times.mkdir()
    return program, times


def _seconds(times: Path) -> float:
    """Seconds from the first byte of the first worker to the last byte of the last one."""
    spans = [tuple(map(float, path.read_text().split())) for path in times.iterdir()]
    assert len(spans) == 2
    return max(end for _, end in spans) - min(start for start, _ in spans)
