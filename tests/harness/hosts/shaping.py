"""Slow links and slow hosts in a network of namespaces (`namespaces.py`), for root on Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.harness.hosts.namespaces import IP, Host
from tests.harness.witness import wait_until

_VERSION_1 = Path("/sys/fs/cgroup/cpu")
GROUPS = _VERSION_1 if _VERSION_1.is_dir() else Path("/sys/fs/cgroup")
"""The control groups that limit CPU time."""
PERIOD_US = 100_000
FULL_MBIT, SLOW_MBIT = 1000, 100
QUOTA = 0.3
"""Cores of a host with a quota."""


def shape(hosts: Iterable[Host]) -> None:
    """Limits each host's link to a gigabit per second, and adds a class of a tenth of that, which nothing uses yet.

    Without limits, the speed of a link between namespaces varies with the load of the CPU.
    """
    for host in hosts:
        _tc(host, "qdisc", "add", "dev", host.device, "root", "handle", "1:", "htb", "default", "10")
        for name, mbit in (("1:10", FULL_MBIT), ("1:20", SLOW_MBIT)):
            rate = ["htb", "rate", f"{mbit}mbit", "burst", "64k", "quantum", "60000"]
            _tc(host, "class", "add", "dev", host.device, "parent", "1:", "classid", name, *rate)


@contextlib.contextmanager
def slow_link(host: Host, *others: Host) -> Iterator[None]:
    """Slows traffic from this host to the others down to a tenth."""
    place = ["dev", host.device, "parent", "1:", "protocol", "ip"]
    for other in others:
        _tc(host, "filter", "add", *place, "u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:20")
    try:
        yield
    finally:
        _tc(host, "filter", "del", "dev", host.device, "parent", "1:")


@contextlib.contextmanager
def preferred(hosts: Iterable[Host]) -> Iterator[None]:
    """Runs all processes started on the hosts before others: hosts of their own would share no cores with other tests.

    A niceness would not do that: where the kernel groups processes by session, it counts only within a session.
    """
    with _cpu_group("preferred", [host.daemon.pid for host in hosts]):
        yield


@contextlib.contextmanager
def slow_host(host: Host) -> Iterator[None]:
    """Limits all processes started on the host to QUOTA cores."""
    with _cpu_group("slow", [host.daemon.pid], quota=QUOTA):
        yield


@contextlib.contextmanager
def _cpu_group(name: str, pids: Sequence[int], *, quota: float | None = None) -> Iterator[None]:
    """A preferred control group of these processes and all that they start; at the end, they leave it."""
    group = GROUPS / f"distlaunch-test-{os.getpid()}-{name}"
    before = _group_of(pids[0])
    group.mkdir()
    try:
        if GROUPS == _VERSION_1:
            (group / "cpu.shares").write_text("262144")
            if quota is not None:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * quota)))
        else:
            (GROUPS / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.weight").write_text("10000")
            if quota is not None:
                (group / "cpu.max").write_text(f"{int(PERIOD_US * quota)} {PERIOD_US}")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:

        def is_empty() -> bool:
            left = (group / "cgroup.procs").read_text().split()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    (before / "cgroup.procs").write_text(pid)
            return not left

        wait_until(is_empty, f"no process is in the group {name}")
        group.rmdir()


def _group_of(pid: int) -> Path:
    """The control group that decides on the process's CPU time."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (not controllers and GROUPS != _VERSION_1):
            return GROUPS / path.lstrip("/")
    return GROUPS


def _tc(host: Host, *arguments: str) -> None:
    subprocess.run([IP, "netns", "exec", host.namespace, "tc", *arguments], check=True)
