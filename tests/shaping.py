"""Slow links and slow hosts among hosts in network namespaces (`namespaces.py`), for root on Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.namespaces import IP, Host
from tests.witness import wait_until

_VERSION_1 = Path("/sys/fs/cgroup/cpu")
GROUPS = _VERSION_1 if _VERSION_1.is_dir() else Path("/sys/fs/cgroup")
"""Control groups that share out the processors."""
PERIOD_US = 100_000
FULL_MBIT, SLOW_MBIT = 1000, 100
QUOTA = 0.3
"""Cores of a host with a quota."""


def shape(hosts: Iterable[Host]) -> None:
    """Gives each host a cable of a gigabit, and a slow class of a tenth, which nothing uses yet.

    Unshaped, a cable between namespaces is as fast as the processors, and so as uneven.
    """
    for host in hosts:
        _tc(host, "qdisc", "add", "dev", host.device, "root", "handle", "1:", "htb", "default", "10")
        for name, mbit in (("1:10", FULL_MBIT), ("1:20", SLOW_MBIT)):
            rate = ["htb", "rate", f"{mbit}mbit", "burst", "64k", "quantum", "60000"]
            _tc(host, "class", "add", "dev", host.device, "parent", "1:", "classid", name, *rate)


@contextlib.contextmanager
def slow_link(host: Host, *others: Host) -> Iterator[None]:
    """What this host sends to the others goes at a tenth of the speed."""
    place = ["dev", host.device, "parent", "1:", "protocol", "ip"]
    for other in others:
        _tc(host, "filter", "add", *place, "u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:20")
    try:
        yield
    finally:
        _tc(host, "filter", "del", "dev", host.device, "parent", "1:")


@contextlib.contextmanager
def slow_host(host: Host) -> Iterator[None]:
    """All that is started on the host has a quota of QUOTA cores."""
    group = GROUPS / f"distlaunch-test-{os.getpid()}"
    group.mkdir()
    try:
        allowed = int(PERIOD_US * QUOTA)
        if GROUPS == _VERSION_1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(allowed))
        else:
            (GROUPS / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{allowed} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(host.daemon.pid))
        yield
    finally:

        def is_empty() -> bool:
            pids = (group / "cgroup.procs").read_text().split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (GROUPS / "cgroup.procs").write_text(pid)
            return not pids

        wait_until(is_empty, "nothing has a quota any more")
        group.rmdir()


def _tc(host: Host, *arguments: str) -> None:
    subprocess.run([IP, "netns", "exec", host.namespace, "tc", *arguments], check=True)
