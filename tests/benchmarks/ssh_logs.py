"""A worker that prints a large file as fast as it can, over SSH, against `ssh host cat` of the same file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from tests.benchmarks.pairs import Pair, Row, time_pairs
from tests.benchmarks.peaks import PAUSE_S, peak_rss
from tests.harness.hosts.sshd import QUIET, Hosts, running_hosts, sessions

MEGABYTES = 150
"""File, log and mirror fit into the memory that a virtual machine has at hand; otherwise its host would be measured."""
GIGABIT = 'ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 50ms && exec "$@"'
"""Runs a command in its own network, whose loopback is as slow as Ethernet."""
LINE = b"x" * 99 + b"\n"
RIVAL = "`ssh host cat file > log`"
OVER_GIGABIT = Row("a log over SSH, link of 1 Gbit/s", RIVAL)
HERE = Row("a log over SSH, with both ends on the same cores", RIVAL)
HERE_BY_OPENSSH = Row("a log over SSH with `connection: openssh`, with both ends on the same cores", RIVAL)


def measure(runs: int) -> Iterator[Pair]:
    print(f"a worker prints {MEGABYTES} MB over SSH, first byte to last; rival: `ssh host cat file > log`")
    yield from _compare("on this machine", [], {"openssh": HERE_BY_OPENSSH, "paramiko": HERE}, runs)
    if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("tc"):
        words = ["unshare", "--net", "sh", "-c", GIGABIT, "sh"]
        yield from _compare("over 1 Gbit/s", words, {"openssh": None, "paramiko": OVER_GIGABIT}, runs)
    else:
        print("  a link of 1 Gbit/s needs root, unshare and tc: left out")


def _compare(title: str, words: Sequence[str], rows: Mapping[str, Row | None], runs: int) -> Iterator[Pair]:
    """Measures each connection in a process of its own, which these words start."""
    for connection, row in rows.items():
        command = [*words, sys.executable, "-m", "tests.benchmarks.ssh_logs", connection, str(runs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        ours, rival, peaks = json.loads(done.stdout)
        yield Pair(f"{title}, {connection}", ours, rival, "MB/s", row)
        controller, agents = (max(column) / 2**20 for column in zip(*peaks, strict=True))
        print(f"  peak RSS: controller {controller:.0f} MiB, agent and guardian together {agents:.0f} MiB", flush=True)


def _time(connection: str, runs: int) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """MB/s of both sides, and peaks of RSS in bytes: of the controller, and of agent and guardian."""
    with tempfile.TemporaryDirectory() as folder, running_hosts(Path(folder), QUIET) as hosts:
        hosts.trust()
        big = Path(folder) / "big"
        big.write_bytes(LINE * (MEGABYTES * 1_000_000 // len(LINE)))
        peaks: list[tuple[int, int]] = []
        ours, rival = time_pairs(partial(_ours, hosts, big, peaks, connection), partial(_plain, hosts, big), runs)
    return [MEGABYTES / s for s in ours], [MEGABYTES / s for s in rival], peaks


def _ours(hosts: Hosts, big: Path, peaks: list[tuple[int, int]], connection: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(
            f"nodes: [{{host: gpu-a, python: {sys.executable}}}]\nprogram: {{command: [cat, {big}]}}\n"
            f"working_directory: {folder}\nconnection: {connection}\n"
        )
        command = [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", f"{folder}/run", str(spec)]
        peak = [0, 0]

        def watch(pid: int) -> None:
            below = [python for session in sessions() for python in session.children(recursive=True)]
            peak[0] = max(peak[0], peak_rss([pid]))
            peak[1] = max(peak[1], peak_rss(python.pid for python in below if "python" in python.name()))

        seconds = time_log(command, hosts.env, Path(folder) / "run" / "attempt-1" / "worker-0.log", big, watch)
        peaks.append((peak[0], peak[1]))
        return seconds


def _plain(hosts: Hosts, big: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        return time_log(["sh", "-c", f"exec ssh gpu-a cat {big} > {log}"], hosts.env, log, big, lambda _: None)


def time_log(
    command: Sequence[str], env: Mapping[str, str], log: Path, big: Path, watch: Callable[[int], None]
) -> float:
    """Seconds from the first byte in `log` to the last."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    whole, began, ended = big.stat().st_size, 0.0, 0.0
    looked = time.perf_counter()
    while process.poll() is None:
        size = log.stat().st_size if log.exists() else 0
        if size and not began:
            began = time.perf_counter()
        if size == whole and not ended:
            ended = time.perf_counter()
        if time.perf_counter() > looked + PAUSE_S:
            looked = time.perf_counter()
            with contextlib.suppress(psutil.Error):
                watch(process.pid)
        time.sleep(0.002)
    assert process.returncode == 0
    assert log.stat().st_size == whole
    return (ended or time.perf_counter()) - began  # `cat` ends with its last byte


if __name__ == "__main__":
    print(json.dumps(_time(sys.argv[1], int(sys.argv[2]))))
