"""The versions of a program's folder on a node: who works in one, which is in use, and what is removed of the others.

They lie beside each other in one folder, which several nodes may share. Beside `<version>/` are

- `<version>.lock`, which every agent that works in the version holds shared, and whoever cleans it exclusively;
- `<version>.files`, which says what was sent and how each file looked then. Only what is still the same is ever
  removed. What a task has written or changed is kept, and then this file goes: nobody cleans the version again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Iterable
from typing import Optional, Union

from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.values import FileEntry

NEW = ".new-"
"""Begins the name of what is being built."""
ABANDONED_S = 86_400.0
"""After this, nobody builds it any more: its agent was killed."""

Look = Union[str, list[int], None]
"""How a file looks: where a link leads, or a regular file's size, times and inode, which any change of it changes."""
Sent = dict[str, tuple[Look, str]]
"""How each file looked that was sent, and its hash."""
PIECE = 1 << 20


class NotOursError(Exception):
    """Something that distlaunch did not make is in the way; the text is for the user."""


class Versions:
    """The versions of the folder that tasks know as `to`. Others may work on them at any time."""

    def __init__(self, to: str) -> None:
        self._to = os.path.abspath(os.path.expanduser(to))
        folder, name = os.path.split(self._to)
        self.folder = os.path.join(folder, f".{name}.distlaunch")
        self._held: dict[str, int] = {}
        """The locks of the versions that this process holds."""

    def find_current(self) -> Optional[str]:
        """The version in use, held until it is released or this process ends; None if there is none.

        Raises:
            NotOursError: something that is not ours is in the way.
        """
        version = self._linked()
        while version is not None and os.path.isdir(version):
            if self._hold(version):
                if os.path.isdir(version):
                    return version
                self.release(version)
            before, version = version, self._linked()
            if version == before:
                return None  # somebody is just removing it
        return None

    def _linked(self) -> Optional[str]:
        if not os.path.lexists(self._to):
            return None
        if not os.path.islink(self._to):
            raise NotOursError(f"{self._to} is there already, and distlaunch did not make it; choose another `to:`")
        version = os.path.abspath(os.path.join(os.path.dirname(self._to), os.readlink(self._to)))
        if os.path.dirname(version) != self.folder:
            raise NotOursError(f"{self._to} is a link that distlaunch did not make; choose another `to:`")
        return version

    def release(self, version: Optional[str]) -> None:
        """Says that this process does not work in the version."""
        if version is not None:
            os.close(self._held.pop(version))

    def _hold(self, version: str) -> bool:
        lock = _lock(version, fcntl.LOCK_SH)
        if lock is not None:
            self._held[version] = lock
        return lock is not None

    def make_building(self) -> str:
        """A folder in which a version can be built."""
        make_private_directory(self.folder)
        return tempfile.mkdtemp(prefix=NEW, dir=self.folder)

    def is_of(self, version: str, digest: str) -> bool:
        """Whether a version was made from what has this digest."""
        return os.path.basename(version).startswith(f"{digest[:16]}-")

    def finish(self, building: str, digest: str, files: Iterable[FileEntry]) -> str:
        """Gives what was built its name, and holds it until this process ends."""
        version = os.path.join(self.folder, f"{digest[:16]}-{secrets.token_hex(4)}")
        self._hold(version)  # before it can be seen, so that nobody cleans it
        sent: Sent = {entry.path: (_look(os.path.join(building, entry.path)), entry.sha256) for entry in files}
        with open(_manifest(version), "x", encoding="ascii") as file:
            json.dump(sent, file)
        os.rename(building, version)
        return version

    def switch(self, version: str) -> None:
        """Makes the version the one in use."""
        target = os.path.join(os.path.basename(self.folder), os.path.basename(version))
        if os.path.islink(self._to) and os.readlink(self._to) == target:
            return
        new = os.path.join(self.folder, f"{NEW}{secrets.token_hex(8)}")
        os.symlink(target, new)
        os.replace(new, self._to)

    def clean(self, current: str) -> Generator[Optional[str], None, None]:
        """Removes what was sent from all other versions, a bit at a time, unless somebody works in one.

        Yields:
            a version in which something stays that a task has written; None between two bits of the work.
        """
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if name.startswith(NEW):
                _remove_abandoned(path)
            elif path not in (current, self._linked()) and os.path.exists(_manifest(path)) and os.path.isdir(path):
                lock = _lock(path, fcntl.LOCK_EX)
                if lock is None:  # a run still works in it
                    continue
                try:
                    yield from _clean_version(path)
                finally:
                    os.close(lock)


def _manifest(version: str) -> str:
    return f"{version}.files"


def _lock(version: str, how: int) -> Optional[int]:
    """The descriptor that holds the version's lock; None if that cannot be had now."""
    path = f"{version}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks: then nobody removes anything.
            if how == fcntl.LOCK_SH and not isinstance(error, BlockingIOError):
                return lock
            os.close(lock)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)  # whoever had it has removed the file meanwhile


def _look(path: str) -> Look:
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(facts.st_mode):
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _clean_version(version: str) -> Generator[Optional[str], None, None]:
    try:
        with open(_manifest(version), encoding="ascii") as file:
            sent: Sent = json.load(file)
    except (OSError, ValueError):  # another has just cleaned it
        return
    # Links are never followed: what they lead to is not ours.
    for folder, folders, names in os.walk(version, topdown=False):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if name in folders and not os.path.islink(path):
                    os.rmdir(path)  # if nothing is left in it
                elif _may_go(path, os.path.relpath(path, version), sent):
                    os.unlink(path)
        yield None
    with contextlib.suppress(OSError):
        os.rmdir(version)
    os.unlink(_manifest(version))
    if os.path.isdir(version):
        yield version
    else:
        os.unlink(f"{version}.lock")


def _may_go(path: str, name: str, sent: Sent) -> bool:
    """Whether a file is what was sent, or what Python has compiled of that."""
    if name not in sent:
        return os.path.basename(os.path.dirname(path)) == "__pycache__" and path.endswith(".pyc")
    (then, sha256), now = sent[name], _look(path)
    if not isinstance(then, list) or not isinstance(now, list):
        return now is not None and now == then
    # A file system may number its files anew, or a program may write what was there before.
    return now == then or (now[0] == then[0] and _hash(path) == sha256)


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _remove_abandoned(path: str) -> None:
    with contextlib.suppress(OSError):  # its builder may be done with it at any time
        if time.time() - os.lstat(path).st_mtime > ABANDONED_S:
            if os.path.islink(path):
                os.unlink(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
