"""The process that keeps a pod alive, as the first process of a process namespace."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.witness import wait_until
from worker_entry.pod import keeper

TEXT = Path(keeper.__file__).read_text(encoding="utf-8")
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here; install util-linux")


def keep(first_s: float, idle_s: float, beside: str = "") -> subprocess.Popen[str]:
    """Starts a keeper; `beside`: Python code that first starts other processes as children of the keeper."""
    begin = "import os, subprocess, sys, time\n" + beside
    start = f"{begin}\nos.execv(sys.executable, [sys.executable, '-c', sys.argv[1], *sys.argv[2:]])"
    words = [*NAMESPACE, sys.executable, "-c", start, TEXT, str(first_s), str(idle_s)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def first_process(unshared: subprocess.Popen[str]) -> int:
    """The keeper's pid; `unshare` waits for it."""
    path = Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children")
    wait_until(lambda: bool(path.read_text().split()), "it runs")
    pid = int(path.read_text().split()[0])
    wait_until(lambda: ignores_children(pid), "the keeper is ready")  # before that, the kernel drops the signal
    return pid


def ignores_children(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [ignored] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return bool(ignored & 1 << (signal.SIGCHLD - 1))


def send_term(unshared: subprocess.Popen[str]) -> None:
    subprocess.run(["kill", "-TERM", str(first_process(unshared))], check=True)


def test_the_pod_keeper_exits_if_no_process_starts() -> None:
    with keep(0.1, 600) as unshared:
        assert unshared.wait(20) == 0


def test_the_pod_keeper_exits_when_no_process_is_left() -> None:
    with keep(600, 0.1, "subprocess.Popen(['sleep', '1'])") as unshared:
        assert unshared.wait(20) == 0


def test_the_pod_keeper_exits_at_once_at_sigterm_if_no_process_runs() -> None:
    with keep(600, 600) as unshared:
        send_term(unshared)
        assert unshared.wait(60) == 143


def test_the_pod_keeper_waits_for_running_processes_at_sigterm() -> None:
    with keep(600, 600, "subprocess.Popen(['sh', '-c', 'sleep 3; echo saved'])") as unshared:
        send_term(unshared)
        assert unshared.wait(30) == 143
        assert unshared.stdout is not None
        assert unshared.stdout.read() == "saved\n"
