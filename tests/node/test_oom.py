"""Counters and logs of the kernel distinguish out of memory from other exits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from worker_entry.protocol.values import TaskExit
from worker_entry.system.memory import RECENT_S, OomWatch

NOW = 1000.0
KILLED = TaskExit(signal=signal.SIGKILL)
LOGGED = "6,123,456,-;Memory cgroup out of memory: Killed process 77 (python3) total-vm:9kB, anon-rss:2097152kB, file\n"


class Kernel:
    """The files of a control group, as the kernel provides them."""

    def __init__(self, folder: Path, own: str, counter: str) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "own"
        self.own.write_text(own)
        self.log = folder / "kmsg"
        self._counter = self.root / counter
        self._counter.parent.mkdir(parents=True)
        self.count(2)  # before the watch

    def count(self, number: int) -> None:
        self._counter.write_text(f"low 0\noom_kill_disable 0\noom 5\noom_kill {number}\n")

    def watch(self) -> OomWatch:
        return OomWatch(str(self.root), str(self.own), str(self.log))


@pytest.fixture(
    params=[
        ("0::/user.slice/run\n", "user.slice/run/memory.events"),
        ("0::/docker/9f\n", "memory.events"),  # a container sees its own group at the top
        ("9:pids:/\n4:memory:/run\n0::/\n", "memory/run/memory.oom_control"),
        ("4:memory:/docker/9f\n", "memory/memory.oom_control"),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container"],
)
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    own, counter = request.param
    return Kernel(tmp_path, own, counter)


def test_a_kill_that_the_kernel_counts_is_reported_as_out_of_memory(kernel: Kernel) -> None:
    watch = kernel.watch()
    assert watch.find(77, KILLED, NOW) is None
    kernel.count(3)
    problem = watch.find(77, KILLED, NOW)
    assert problem is not None
    assert problem.reference == "out-of-memory"
    assert problem.message == "the kernel's OOM killer killed a process in its control group"
    assert watch.find(77, TaskExit(code=137), NOW) is not None  # a shell's child was the victim


def test_an_oom_kill_explains_only_exits_soon_afterwards(kernel: Kernel) -> None:
    watch = kernel.watch()
    kernel.count(4)
    assert watch.find(77, KILLED, NOW) is not None
    assert watch.find(78, KILLED, NOW + 1) is not None  # the other victim
    assert watch.find(79, KILLED, NOW + RECENT_S) is None  # by `kill -9`
    kernel.count(5)  # a child was killed, and its parent continues
    watch.poll(NOW + 100)
    assert watch.find(80, KILLED, NOW + 100 + RECENT_S) is None
    kernel.count(6)
    problem = watch.find(81, KILLED, NOW + 200)
    assert problem is not None
    assert "killed a process in" in problem.message


@pytest.mark.parametrize("how", [TaskExit(code=1), TaskExit(signal=signal.SIGSEGV), TaskExit(signal=signal.SIGTERM)])
def test_exits_other_than_a_kill_are_not_out_of_memory(kernel: Kernel, how: TaskExit) -> None:
    watch = kernel.watch()
    kernel.count(3)
    assert watch.find(77, how, NOW) is None


def test_an_oom_victim_named_by_the_kernel_is_reported_with_its_memory(kernel: Kernel) -> None:
    kernel.log.write_text("6,1,2,-;Killed process 78 (python3) total-vm:9kB, anon-rss:1024kB\n")  # before the watch
    watch = kernel.watch()
    with kernel.log.open("a") as log:
        log.write(LOGGED)
    assert watch.find(78, KILLED, NOW) is None
    problem = watch.find(77, KILLED, NOW)
    assert problem is not None
    assert problem.message == "the kernel's OOM killer killed it; it held 2,048 MiB"


def test_a_system_without_oom_evidence_reports_no_out_of_memory(tmp_path: Path) -> None:
    assert OomWatch(str(tmp_path), str(tmp_path / "own"), str(tmp_path / "log")).find(os.getpid(), KILLED, NOW) is None
