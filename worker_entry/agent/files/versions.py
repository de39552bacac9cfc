"""Manages the versions of a program's folder on a node: which agents use one, which is current, what may be removed.

The versions lie side by side in one folder, which several nodes may share. Next to `<version>/` are

- `<version>.lock`: an agent that uses the version holds a shared lock, an agent that cleans it an exclusive one;
- `<version>.files`: the files that were sent, with a fingerprint of each. Only files that still match are ever
  removed. If a task has written or changed files, these are kept and this list is deleted, so that the version is
  never cleaned again.
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
from collections.abc import Callable, Generator, Iterable
from typing import Optional, Union

from worker_entry.protocol.values import FileEntry
from worker_entry.system.ownership import TRUST, find_intruder, private, verify_private

SUFFIX = ".distlaunch"
"""Suffix of the name of the folder with the versions."""
NEW = ".new-"
"""Prefix of the name of a version that is being built."""
ABANDONED_S = 86_400.0
"""An unfinished version older than this was abandoned: its agent was killed."""

Fingerprint = Union[str, list[int], None]
"""A link's target, or a regular file's size, times and inode: any change to the file changes one of them."""
Sent = dict[str, tuple[Fingerprint, str]]
"""The fingerprint and the hash of each file that was sent."""
PIECE = 1 << 20


class CannotCopyError(Exception):
    """The folder cannot be copied; the message is shown to the user."""


class NotOursError(CannotCopyError):
    """Something that distlaunch did not make is in the way; the message is for the user."""


class Versions:
    """The versions of the folder that tasks know as `to`. Other agents may change them at any time."""

    def __init__(self, to: str) -> None:
        self._to = os.path.abspath(os.path.expanduser(to))
        folder, name = os.path.split(self._to)
        self.folder = os.path.join(folder, f".{name}{SUFFIX}")
        self._held: dict[str, int] = {}
        """The lock descriptors that this process holds, by version."""

    def find_current(self) -> Optional[str]:
        """The current version, locked until it is released or this process ends; None if there is none.

        Raises:
            NotOursError: something that distlaunch did not make is in the way.
        """
        self._verify()
        version = self._linked()
        while version is not None and os.path.isdir(version):
            if self._hold(version):
                if os.path.isdir(version):
                    return version
                self.release(version)
            before, version = version, self._linked()
            if version == before:
                return None  # another agent is removing it
        return None

    def _verify(self) -> None:
        """Raises NotOursError if another user can change the versions, or the link to them."""
        above = self.folder
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        try:
            if above == self.folder:
                verify_private(self.folder)
            reason = find_intruder(above, is_above=True)
        except OSError as error:
            reason = f"{error.filename} {error.strerror}"
        if reason:
            raise NotOursError(f"{reason}; choose a `to:` that only you can change, or name its folder in {TRUST}")

    def _linked(self) -> Optional[str]:
        if not os.path.lexists(self._to):
            return None
        if os.lstat(self._to).st_uid != os.geteuid():
            raise NotOursError(f"{self._to} belongs to another user; choose another `to:`")
        if not os.path.islink(self._to):
            raise NotOursError(f"{self._to} exists, and distlaunch did not make it; choose another `to:`")
        version = os.path.abspath(os.path.join(os.path.dirname(self._to), os.readlink(self._to)))
        if os.path.dirname(version) != self.folder:
            raise NotOursError(f"{self._to} is a link that distlaunch did not make; choose another `to:`")
        return version

    def release(self, version: Optional[str]) -> None:
        """Releases the lock: this process no longer uses the version."""
        if version is not None:
            os.close(self._held.pop(version))

    def _hold(self, version: str) -> bool:
        lock = _lock(version, fcntl.LOCK_SH)
        if lock is not None:
            self._held[version] = lock
        return lock is not None

    def make_building(self) -> str:
        """Makes a folder in which a version can be built."""
        private(self.folder)
        return tempfile.mkdtemp(prefix=NEW, dir=self.folder)

    def is_of(self, version: str, digest: str) -> bool:
        """Whether the version was made from files with this digest."""
        return os.path.basename(version).startswith(f"{digest[:16]}-")

    def finish(self, building: str, digest: str, files: Iterable[FileEntry]) -> str:
        """Gives a finished version its name, and locks it until this process ends."""
        version = os.path.join(self.folder, f"{digest[:16]}-{secrets.token_hex(4)}")
        self._hold(version)  # before it is visible, so that no other agent cleans it
        sent: Sent = {entry.path: (_fingerprint(os.path.join(building, entry.path)), entry.sha256) for entry in files}
        with open(_manifest(version), "x", encoding="ascii") as file:
            json.dump(sent, file)
        os.rename(building, version)
        return version

    def switch(self, version: str) -> None:
        """Makes the version the current one."""
        target = os.path.join(os.path.basename(self.folder), os.path.basename(version))
        if os.path.islink(self._to) and os.readlink(self._to) == target:
            return
        new = os.path.join(self.folder, f"{NEW}{secrets.token_hex(8)}")
        os.symlink(target, new)
        os.replace(new, self._to)

    def clean(self, current: str) -> Generator[Optional[str], None, None]:
        """Removes the sent files of all other versions that are not in use, a bit at a time.

        Yields:
            a version in which files that a task has written are kept; None between two bits of work.
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


def find_unchanged(folder: str) -> Callable[[str], bool]:
    """Returns a function that checks whether a file is as it was sent; always false if the folder is not a version."""
    sent: Sent = {}
    if os.path.dirname(folder).endswith(SUFFIX):
        with contextlib.suppress(OSError, ValueError), open(_manifest(folder), encoding="ascii") as file:
            sent = json.load(file)

    def is_unchanged(path: str) -> bool:
        with contextlib.suppress(OSError):  # a task has just removed it
            return path in sent and _is_removable(os.path.join(folder, path), path, sent)
        return False

    return is_unchanged


def _manifest(version: str) -> str:
    return f"{version}.files"


def _lock(version: str, how: int) -> Optional[int]:
    """A descriptor that holds the version's lock; None if another process holds it."""
    path = f"{version}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks, nothing is ever removed.
            if how == fcntl.LOCK_SH and not isinstance(error, BlockingIOError):
                return lock
            os.close(lock)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)  # its last holder has removed the file


def _fingerprint(path: str) -> Fingerprint:
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
    except (OSError, ValueError):  # another agent has just cleaned it
        return
    # Links are never followed: their targets are not ours.
    for folder, folders, names in os.walk(version, topdown=False):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if name in folders and not os.path.islink(path):
                    os.rmdir(path)  # if it is empty
                elif _is_removable(path, os.path.relpath(path, version), sent):
                    os.unlink(path)
        yield None
    with contextlib.suppress(OSError):
        os.rmdir(version)
    os.unlink(_manifest(version))
    if os.path.isdir(version):
        yield version
    else:
        os.unlink(f"{version}.lock")


def _is_removable(path: str, name: str, sent: Sent) -> bool:
    """Whether a file is as it was sent, or Python's bytecode for such a file."""
    if name not in sent:
        return os.path.basename(os.path.dirname(path)) == "__pycache__" and path.endswith(".pyc")
    (then, sha256), now = sent[name], _fingerprint(path)
    if not isinstance(then, list) or not isinstance(now, list):
        return now is not None and now == then
    # A file system may renumber its inodes, or a program may write the same content again.
    return now == then or (now[0] == then[0] and _hash(path) == sha256)


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _remove_abandoned(path: str) -> None:
    with contextlib.suppress(OSError):  # its builder may rename it at any time
        if time.time() - os.lstat(path).st_mtime > ABANDONED_S:
            if os.path.islink(path):
                os.unlink(path)
            else:
                shutil.rmtree(path, ignore_errors=True)
