"""System calls beyond Python's `os`: all Linux-only calls, each with a portable fall-back.

On Linux an agent is a *subreaper*: processes that its tasks leave behind become its children and cannot escape.
Elsewhere (macOS), and if DISTLAUNCH_PORTABLE is set, process groups and `ps` replace the subreaper: a process that
leaves its group *and* loses its parent is not found, and nothing stops the tasks of an agent that dies of SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterable
from typing import Optional

from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass

LINUX = sys.platform == "linux" and not os.environ.get(environment.PORTABLE)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


@dataclass(frozen=True)
class Process:
    """A process at one moment; `started` (clock ticks, 0 if unknown) distinguishes it from later users of its pid."""

    pid: int
    parent: int
    group: int
    started: int
    zombie: bool


def become_subreaper() -> None:
    """Makes this process the new parent of orphans among its descendants."""
    if _libc is not None and _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(signum: int, parent: int) -> None:
    """Called in a new child: makes it receive `signum` when `parent` dies, or now if the parent is already dead.

    The parent must be single-threaded: the kernel watches the *thread* that forked.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def descendants(
    root: int, groups: Iterable[int] = (), *, spare: Collection[int] = (), unreaped: bool = False
) -> list[Process]:
    """Returns all living processes below `root`; outside Linux, also the members of these process groups.

    Args:
        root: the pid whose descendants are returned, without `root` itself.
        groups: the process groups.
        spare: processes to omit, with their descendants.
        unreaped: whether to include zombies among the children of `root`. The search can miss a process that forks and
            exits meanwhile, but not its zombie: nothing is left only if there is no zombie either.
    """
    if LINUX and root == os.getpid() and not _has_children():
        return []
    everything = _processes_from_proc() if LINUX else _processes_from_ps()
    children: dict[int, list[Process]] = {}
    for process in everything.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    queue = [root]
    if not LINUX:
        wanted: set[int] = set(groups)
        members = [p for p in everything.values() if p.group in wanted and p.pid != root]
        found.update((p.pid, p) for p in members)
        queue += [p.pid for p in members]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child.pid not in found and child.pid not in spare:
                found[child.pid] = child
                queue.append(child.pid)
    return [p for p in found.values() if not p.zombie or (unreaped and p.parent == root)]


def below(roots: Iterable[int]) -> dict[int, list[int]]:
    """Returns the pids of the living processes below each root, from one scan of the process table; Linux only."""
    children: dict[int, list[int]] = {}
    for process in (_processes_from_proc() if LINUX else {}).values():
        if not process.zombie:
            children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, list[int]] = {}
    for root in roots:
        found[root] = [*children.get(root, ())]
        for pid in found[root]:
            found[root] += children.get(pid, ())
    return found


def look_up(pid: int) -> Optional[Process]:
    """Returns the process that has this pid now; None if no process has it, or without /proc."""
    return _process(pid) if LINUX else None


def with_variable(name: str, values: Collection[str]) -> list[Process]:
    """Returns this user's living processes whose environment variable `name` had one of these values at their start."""
    wanted = {f"{name}={value}".encode() for value in values}
    found = []
    for process in (_processes_from_proc() if LINUX else {}).values():
        if process.zombie or process.pid == os.getpid():
            continue
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as stream:
                if wanted.intersection(stream.read().split(b"\0")):
                    found.append(process)
        except OSError:  # another user's process, or gone
            continue
    return found


def send_signal(process: Process, signum: int) -> bool:
    """Signals exactly this process, not a later process with its pid; False if the process is gone.

    Raises:
        PermissionError: the process runs as another user.
    """
    descriptor = None
    try:
        if LINUX:
            descriptor = open_pidfd(process.pid)
            # The descriptor pins the process: if it is the right process now, no other process can replace it.
            current = _process(process.pid)
            if current is None or current.started != process.started:
                return False
        if descriptor is None:
            os.kill(process.pid, signum)
        else:
            signal.pidfd_send_signal(descriptor, signum)  # type: ignore[attr-defined,unused-ignore]  # Linux only
    except ProcessLookupError:
        return False
    else:
        return True
    finally:
        if descriptor is not None:
            os.close(descriptor)


def kill_on_sight(root: int, spare: Collection[int] = ()) -> set[int]:
    """Kills each process below `root` as soon as it is found, and so catches processes that live very briefly.

    It may miss some processes; `descendants` finds them.
    """
    killed: set[int] = set()
    queue = [pid for pid in _children(root) if pid not in spare] if LINUX else []
    while queue:
        process = _process(queue.pop())
        if process is not None and not process.zombie:
            # The children are listed first: once the process is dead, they are no longer below it.
            queue += _children(process.pid)
            with contextlib.suppress(PermissionError):
                if send_signal(process, signal.SIGKILL):
                    killed.add(process.pid)
    return killed


def port_holder(port: int) -> Optional[str]:
    """The process that holds a TCP port of this machine, as `pid 123 (python)`; None if it is not found."""
    if not LINUX:
        return None
    inodes = {f"socket:[{inode}]" for inode in _socket_inodes(port) if inode != "0"}
    if not inodes:
        return None
    for pid in pids():
        if inodes.intersection(open_files(pid).values()):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                return f"pid {pid} ({stream.read().strip()})"
    return None


def open_files(pid: int) -> dict[int, str]:
    """What each descriptor of a process refers to, as /proc names it; empty if the process is gone or not ours."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def only_closing(port: int) -> bool:
    """Whether the only sockets on a port are closing connections that belong to no process any more."""
    return LINUX and set(_socket_inodes(port)) == {"0"}


def _has_children() -> bool:
    """Whether this process has children, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def open_pidfd(pid: int) -> Optional[int]:
    """Returns None without pidfds: on Linux before 5.3, in some sandboxes, or if Python was built on an old system."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _process(pid: int) -> Optional[Process]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            text = stream.read()
    except OSError:
        return None
    # proc(5): the second field is the command's name in parentheses, which may contain any character.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        started=int(fields[19]),
        zombie=fields[0] in (b"Z", b"X"),
    )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as stream:
                found += map(int, stream.read().split())
    except OSError:  # gone, or a kernel without this list
        pass
    return found


def _processes_from_proc() -> dict[int, Process]:
    found = (_process(pid) for pid in pids())
    return {process.pid: process for process in found if process is not None}


def _processes_from_ps() -> dict[int, Process]:
    import subprocess

    with subprocess.Popen(
        ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="],  # noqa: S607 - POSIX has no fixed place for ps
        stdout=subprocess.PIPE,
        text=True,
    ) as ps:
        listing = ps.communicate()[0]
    found = {}
    for line in listing.splitlines():
        pid, parent, group, state = line.split()[:4]
        found[int(pid)] = Process(int(pid), int(parent), int(group), started=0, zombie=state.startswith("Z"))
    found.pop(ps.pid, None)
    return found


def _socket_inodes(port: int) -> list[str]:
    """The inodes of the sockets that listen or are connected on a local TCP port; 0 for a socket of no process."""
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as stream:
                rows = stream.readlines()[1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            fields = row.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes
