"""A network for one test, in which this machine has every address, so that a caller may use any source address."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path

from tests.harness.hosts.namespaces import IP

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_FREEBIND = {socket.AF_INET: (socket.IPPROTO_IP, 15), socket.AF_INET6: (socket.IPPROTO_IPV6, 78)}


def enter_own_network() -> None:
    """Moves this single-threaded process into a new network; needs no root."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for command in ("link set lo up", "route add local 0.0.0.0/0 dev lo", "-6 route add local ::/0 dev lo"):
        subprocess.run([IP, *command.split()], check=True)


def call(source: str, port: int, destination: str | None = None) -> socket.socket:
    """A connection from this address, which may be any except an IPv4-mapped one.

    Raises:
        OSError: the connection was refused.
    """
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    caller = socket.socket(family)
    try:
        caller.setsockopt(*_FREEBIND[family], 1)
        caller.settimeout(5)
        caller.bind((source, 0))
        caller.connect((destination or ("::1" if family == socket.AF_INET6 else "127.0.0.1"), port))
    except OSError:
        caller.close()
        raise
    return caller


def networks(machines: Collection[Path] = ()) -> set[str]:
    """The network namespaces of this machine's processes.

    `machines`: if given, only of processes in one of these UTS namespaces, each the target of `ns/uts`: containers of
    other tests come and go.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns"):
        with contextlib.suppress(OSError):
            if not machines or (process / "uts").readlink() in machines:
                found.add(str((process / "net").readlink()))
    return found
