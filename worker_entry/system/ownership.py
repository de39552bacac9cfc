"""Finds out who else can change a file or folder: code that another user can change must not be executed.

Trusted are this user and root; for root, also the user who has called sudo; and the folders that the user's variable
DISTLAUNCH_TRUST names. In a pod, all files are trusted, because mounted files may have any owner.

The module imports no other module of ours: a node runs it before distlaunch is installed (`payload`).
"""

from __future__ import annotations

import os
import stat
from typing import Optional

TRUST = "DISTLAUNCH_TRUST"
"""Folders that this user trusts no matter who can write to them, separated by colons."""
LINKS = 40
"""Symbolic links that a path may have, as in Linux."""


def private(folder: str) -> str:
    """Returns the folder, made if missing; raises OSError if another user can change it."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return verify_private(folder)


def verify_private(folder: str) -> str:
    """Returns the folder; raises OSError if it is missing or a link, or if another user can change it or its path."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        raise OSError(20, "is not a folder", folder)
    if facts.st_uid != os.geteuid():
        raise OSError(1, f"belongs to user {facts.st_uid}", folder)
    reason = find_intruder(folder)
    if reason:
        raise OSError(1, reason, folder)
    return folder


def find_intruder(path: str, *, is_above: bool = False) -> str:
    """Why another user can change the file or folder, or redirect its path; empty if none can.

    Args:
        path: an existing path; its links are followed.
        is_above: whether the path is a folder in which only this user's own files matter.

    Raises:
        OSError: the path is missing, or cannot be inspected.
    """
    if is_trusted(path):
        return ""
    place, rest, links = os.sep, _split(os.path.abspath(path)), 0
    facts = os.lstat(place)
    reason = _find_writer(place, facts, is_last=not rest and not is_above)
    while rest and not reason:
        name = rest.pop(0)
        below = os.path.dirname(place) if name == os.pardir else os.path.join(place, name)
        facts = os.lstat(below)
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            target = os.readlink(below)
            reason = "has too many links" if links > LINKS else _find_owner(below, facts)
            place, rest = os.sep if os.path.isabs(target) else place, [*_split(target), *rest]
        else:
            place, reason = below, _find_writer(below, facts, is_last=not rest and not is_above)
    return reason


def find_writer(path: str) -> str:
    """Why another user can write to this file or folder itself; empty if none can. Raises OSError if it is missing."""
    return _find_writer(path, os.stat(path), is_last=True)


def _split(path: str) -> list[str]:
    return [name for name in path.split(os.sep) if name not in ("", os.curdir)]


def _find_writer(path: str, facts: os.stat_result, *, is_last: bool) -> str:
    """Why another user can write here; in a folder with the sticky bit, users cannot replace others' files."""
    if reason := _find_owner(path, facts):
        return reason
    if facts.st_mode & stat.S_ISVTX and not is_last:
        return ""
    if facts.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user"
    if facts.st_mode & stat.S_IWGRP and not _is_own_group(facts.st_gid):
        return f"{path} can be written by group {facts.st_gid}"
    return ""


def _find_owner(path: str, facts: os.stat_result) -> str:
    is_trusted = facts.st_uid in trusted_users() or facts.st_uid == _unmapped_user()
    return "" if is_trusted else f"{path} belongs to user {facts.st_uid}"


def trusted_users() -> set[int]:
    """The users whose files this process may execute."""
    caller = os.environ.get("SUDO_UID", "")
    return {os.geteuid(), 0, *([int(caller)] if os.geteuid() == 0 and caller.isdigit() else [])}


def is_trusted(path: str) -> bool:
    """Whether DISTLAUNCH_TRUST names this path or a folder above it (`*`: all folders); always true in a pod."""
    if is_pod():
        return True
    named = [os.path.realpath(each) if each != "*" else os.sep for each in os.environ.get(TRUST, "").split(":") if each]
    return any(os.path.commonpath([each, os.path.realpath(path)]) == each for each in named)


def is_pod() -> bool:
    """Whether this process runs in a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or os.path.exists("/var/run/secrets/kubernetes.io")


def _is_own_group(gid: int) -> bool:
    """Whether this user is the group's only member, as in distributions that give each user a group."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == 0 or (gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name})


def _unmapped_user() -> Optional[int]:
    """The owner that a user namespace shows for files of users whom it does not map, root among them."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as stream:
            mapped = sum(int(line.split()[2]) for line in stream)
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as stream:
            return int(stream.read()) if mapped < (1 << 32) - 1 else None
    except (OSError, ValueError):
        return None
