"""What distlaunch needs of the operating system: descendants, exact signals, holders of ports, GPUs, cores."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.harness.apart import apart, apart_on_linux, linux
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.witness import open_descriptors
from worker_entry.system import hardware, kernel

FAMILY = str(PROGRAMS / "tree_family.py")


@contextmanager
def family(*members: str) -> Iterator[tuple[int, dict[str, int]]]:
    """Starts `tree_family.py`; yields its pid and those of its members, and kills the ones still alive at the end."""
    process = subprocess.Popen([sys.executable, FAMILY, *members], stdout=subprocess.PIPE, start_new_session=True)
    pids: dict[str, int] = {}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == b"stands\n":
                break
            name, pid = line.split()
            pids[name.decode()] = int(pid)
        yield process.pid, pids
    finally:
        for relative in psutil.Process(process.pid).children(recursive=True):
            relative.kill()
        process.kill()
        if "daemon" in pids:  # the test has adopted it
            os.kill(pids["daemon"], signal.SIGKILL)
            os.waitpid(pids["daemon"], 0)
        process.communicate()


def pids_below(root: int, groups: tuple[int, ...] = ()) -> set[int]:
    return {process.pid for process in kernel.descendants(root, groups)}


# --- descendants ---


@apart
def test_descendants_include_children_and_grandchildren_but_not_the_root() -> None:
    with family("child", "grandchild", "stopped") as (root, pids):
        found = pids_below(root)
        assert set(pids.values()) < found
        assert len(found) == 4  # and the grandchild's parent
        assert found == {process.pid for process in psutil.Process(root).children(recursive=True)}


@apart
def test_zombies_are_among_the_descendants_only_on_request() -> None:
    with family("zombie", "child") as (root, pids):
        assert psutil.Process(pids["zombie"]).status() == psutil.STATUS_ZOMBIE
        assert pids_below(root) == {pids["child"]}
        unreaped = {process.pid: process.zombie for process in kernel.descendants(root, unreaped=True)}
        assert unreaped == {pids["child"]: False, pids["zombie"]: True}


@apart_on_linux
def test_a_subreaper_adopts_a_daemon_with_its_own_session() -> None:
    kernel.become_subreaper()
    with family("daemon") as (_, pids):
        [daemon] = [process for process in kernel.descendants(os.getpid()) if process.pid == pids["daemon"]]
        assert daemon.parent == os.getpid()
        assert daemon.group != os.getpgrp()


@apart
def test_spared_processes_and_their_descendants_are_not_among_the_descendants() -> None:
    with family("grandchild") as (spared, _), family("child") as (other, pids):
        found = {process.pid for process in kernel.descendants(os.getpid(), spare={spared})}
        assert found == {other, pids["child"]}


def test_the_portable_fallback_finds_orphaned_members_of_a_process_group() -> None:
    """Without a subreaper, they are no longer descendants of this process."""
    code = """if True:
        import os, subprocess, sys
        from worker_entry.system import hardware, kernel
        assert not kernel.LINUX
        orphan = "import os, sys, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(60)"
        leader = subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE, start_new_session=True)
        pid = int(leader.stdout.readline())
        leader.wait()
        below = [process.pid for process in kernel.descendants(os.getpid())]
        [found] = kernel.descendants(os.getpid(), [leader.pid])
        assert kernel.send_signal(found, 9)
        print(pid, found.pid, pid in below)
    """
    env = {**os.environ, "DISTLAUNCH_PORTABLE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    pid, found, below = done.stdout.split()
    assert pid == found
    assert below == "False"
    eventually(lambda: gone(int(pid)))


def gone(pid: int) -> None:
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@linux
@pytest.mark.parametrize("name", ["a b c", "x) R 1 (y", ") S 0 0", "((((", "\n9 (z) S 1\n", "ÿé"])
def test_a_process_with_any_name_is_found_among_the_descendants(name: str) -> None:
    """The kernel writes it unescaped into the middle of /proc/PID/stat."""
    code = f"""if True:
        import ctypes, time
        ctypes.CDLL(None).prctl(15, {name.encode()[:15]!r}, 0, 0, 0)
        print("named", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        [found] = [found for found in kernel.descendants(os.getpid()) if found.pid == process.pid]
        assert (found.parent, found.group, found.zombie) == (os.getpid(), os.getpgrp(), False)
        assert found.started > 0
    finally:
        process.kill()
        process.communicate()


# --- signals ---


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def find(process: subprocess.Popen[bytes]) -> kernel.Process:
    [found] = [found for found in kernel.descendants(os.getpid()) if found.pid == process.pid]
    return found


@apart
def test_send_signal_signals_a_living_process() -> None:
    with child() as process:
        assert kernel.send_signal(find(process), signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


@apart
def test_send_signal_does_not_signal_an_ended_process() -> None:
    with child() as process:
        found = find(process)
        process.kill()
        process.wait()
    assert not kernel.send_signal(found, signal.SIGTERM)


@linux
def test_send_signal_does_not_signal_a_later_process_with_the_same_pid() -> None:
    with child() as process:
        found = find(process)
        earlier = kernel.Process(found.pid, found.parent, found.group, found.started - 1, zombie=False)
        assert not kernel.send_signal(earlier, signal.SIGKILL)
        assert process.poll() is None
        assert kernel.send_signal(found, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@linux
def test_send_signal_does_not_signal_a_later_process_without_pidfd_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was built on an old system (conda's) lacks the calls."""
    monkeypatch.delattr(os, "pidfd_open")
    with child() as process:
        found = find(process)
        earlier = kernel.Process(found.pid, found.parent, found.group, found.started - 1, zombie=False)
        assert not kernel.send_signal(earlier, signal.SIGKILL)
        assert kernel.send_signal(found, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not kernel.send_signal(found, signal.SIGKILL)


@linux
def test_send_signal_leaves_no_descriptor_open() -> None:
    before = open_descriptors()
    with child() as process:
        found = find(process)
        kernel.send_signal(found, signal.SIGCONT)
        kernel.send_signal(kernel.Process(found.pid, 0, 0, 1, zombie=False), signal.SIGCONT)
        process.kill()
    kernel.send_signal(found, signal.SIGCONT)
    assert open_descriptors() <= before


@linux
@pytest.mark.parametrize("late", [False, True], ids=["after the call", "before the call"])
def test_a_child_process_dies_with_its_parent(late: bool) -> None:
    code = f"""if True:
        import os, signal, time
        from worker_entry.system import hardware, kernel
        parent, late = os.getpid(), {late}
        if os.fork() == 0:
            while late and os.getppid() == parent:
                time.sleep(0.001)
            kernel.die_with_parent(signal.SIGKILL, parent)
            print(os.getpid(), flush=True)
            time.sleep(60)
        if not late:
            time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    if late:
        assert parent.stdout.read() == b""  # the child died before it printed: no process holds the pipe
        parent.wait()
        return
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.communicate()
    eventually(lambda: gone(pid))


# --- ports ---


@linux
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_port_holder_names_the_process_that_listens_on_a_port(family: socket.AddressFamily) -> None:
    with socket.socket(family) as server:
        server.bind(("", 0))
        server.listen()
        name = Path("/proc/self/comm").read_text().strip()
        assert kernel.port_holder(server.getsockname()[1]) == f"pid {os.getpid()} ({name})"


@linux
def test_port_holder_returns_none_for_a_port_without_a_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("", 0))
        assert kernel.port_holder(bound.getsockname()[1]) is None  # no table of the kernel shows it yet


# --- GPUs and cores ---


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2,3", ["2", "3"]),
        (" 2 , 3 ", ["2", "3"]),
        ("1,-1,0", ["1"]),
        ("1,,0", ["1"]),
        ("GPU-8a56,MIG-11", ["GPU-8a56", "MIG-11"]),
    ],
)
def test_gpus_are_read_from_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == gpus


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("printf '0\\n1\\n'", ["0", "1"]),
        ("", []),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", []),
    ],
    ids=["two", "none", "a broken driver"],
)
def test_gpus_are_read_from_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, gpus: list[str]
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader" ] || exit 64\n{script}\n')
    fake.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert hardware.gpus() == gpus


def test_no_gpus_are_found_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpus() == []


@linux
def test_the_core_count_follows_the_cpu_affinity_of_the_process() -> None:
    everything = os.sched_getaffinity(0)
    assert hardware.cores() == len(everything)
    try:
        os.sched_setaffinity(0, {min(everything)})
        assert hardware.cores() == 1
    finally:
        os.sched_setaffinity(0, everything)
