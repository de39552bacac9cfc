"""The attributes, besides the environment, that the children of a process inherit from it."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import worker_entry
from worker_entry.system.cgroups import cores_limit, memory_limit
from worker_entry.system.process_use import read_small

STATUS = {
    "Uid": "user",
    "Gid": "group",
    "Groups": "groups",
    "Umask": "umask",
    "SigIgn": "ignored signals",
    "SigBlk": "blocked signals",
    "CapEff": "capabilities",
    "CapBnd": "capabilities",
    "CapAmb": "capabilities",
    "NoNewPrivs": "privileges",
    "Seccomp": "system call filter",
    "Cpus_allowed_list": "CPU affinity",
    "Mems_allowed_list": "memory nodes",
}
"""Fields of /proc/self/status, as a user knows them."""
SCOPE = re.compile(r"[^/\n]*\.scope")
"""The control group of one login, or of one window of a terminal: a user's connections always differ in it."""


def find_fingerprint() -> dict[str, str]:
    """The attributes of this process by their names for the user; call it before any signal handler is set."""
    found: dict[str, str] = {}
    for line in _read("/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name in STATUS:
            found[STATUS[name]] = f"{found.get(STATUS[name], '')} {value.strip()}"
    limit = memory_limit()
    found["control group"] = SCOPE.sub("*.scope", _read("/proc/self/cgroup"))
    found["limit of a control group"] = f"{cores_limit()} {None if limit is None else limit.size}"
    found["set of limits (`ulimit`)"] = _read("/proc/self/limits")
    found["nice value"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        found["root folder"] = os.readlink("/proc/self/root")
    found["security label"] = _read("/proc/self/attr/current")
    found["version of distlaunch"] = _digest_package()
    return found


def make_key() -> str:
    """A key for the agents that this process may use: those with its user, interpreter and namespaces."""
    import hashlib  # slow, and only for an agent that may stay

    parts = [str(os.getuid()), sys.executable, sys.version]
    for name in sorted(os.listdir("/proc/self/ns")):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return hashlib.blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def find_difference(one: dict[str, str], other: dict[str, str]) -> str:
    """The name of the first attribute that differs; empty if none does."""
    return next((name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)), "")


def _digest_package() -> str:
    """A digest of our own source: a newer version must not meet an older one that is still in memory."""
    import hashlib

    top = os.path.dirname(worker_entry.__file__)
    digest = hashlib.blake2b(digest_size=16)
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb", buffering=0) as stream:
                    content = stream.read()
                digest.update(f"{os.path.relpath(path, top)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _read(path: str) -> str:
    try:
        return read_small(path).decode(errors="surrogateescape")
    except OSError:
        return ""
