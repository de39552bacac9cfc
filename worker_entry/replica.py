"""The program's folder on a node: versions beside each other, and a link to the one in use.

A version is built apart, from what the last one has unchanged and from what is fetched; every file is checked by its
hash; then it gets its name, and the link is switched. So a task never sees half of a version, and one that runs keeps
its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import BinaryIO, Optional

from worker_entry.messages import Fetch, Message, Refused, Synced
from worker_entry.orders import Offer, Piece
from worker_entry.run_files import make_private_directory
from worker_entry.values import FileEntry, Problem

PIECE = 1 << 20
"""Bytes that are hashed, or fetched, at once; between two the agent does its other work."""
FETCHES_AT_ONCE = 4
NEW = ".new-"
"""Begins the name of a version that is being built."""
ABANDONED_S = 86_400.0
"""After this, nobody builds it any more: its agent was killed."""


class Replica:
    """The arrival of one version. `step` does a bit of the work; `send` is how the agent talks to its controller."""

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        self.done = False
        self.directory: Optional[str] = None
        """Where the version is, once it is there."""
        self._offer = offer
        self._send = send
        self._to = os.path.abspath(os.path.expanduser(offer.to))
        folder, name = os.path.split(self._to)
        self._versions = os.path.join(folder, f".{name}.distlaunch")
        self._building = ""
        self._awaited: deque[Fetch] = deque()
        self._pieces: deque[bytes] = deque()
        self._fetched = 0
        self._work = self._arrive()

    @property
    def waits(self) -> bool:
        """Whether there is nothing to do before another piece comes."""
        return self.done or (bool(self._awaited) and not self._pieces)

    def step(self) -> None:
        """Does a bit of the work."""
        if self.waits:
            return
        try:
            next(self._work, None)
        except _CannotSyncError as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename or self._to}: {error.strerror}")

    def take(self, piece: Piece, body: bytes) -> None:
        """A piece has come; one that was not asked for, or comes twice, is left."""
        expected = self._awaited[len(self._pieces)] if len(self._pieces) < len(self._awaited) else None
        if expected is not None and (expected.index, expected.offset) == (piece.index, piece.offset):
            self._pieces.append(body)

    def resume(self) -> None:
        """The connection is another: what was asked for over the old one may not come."""
        for fetch in list(self._awaited)[len(self._pieces) :]:
            self._send(fetch)

    def abandon(self) -> None:
        """Leaves nothing half done."""
        self.done = True
        if self._building:
            shutil.rmtree(self._building, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self.abandon()
        self._send(Refused([Problem("sync-failed", reason, "")]))

    # --- the work, which yields between its bits ---

    def _arrive(self) -> Generator[None, None, None]:
        make_private_directory(self._versions)
        current = self._find_current()
        if current is not None and not self._hold(current):  # another is just removing it
            current = None
        missing = yield from self._compare(current)
        if current is None or missing or not current.startswith(self._version_prefix):
            self._building = tempfile.mkdtemp(prefix=NEW, dir=self._versions)
            yield from self._build(current, missing)
            current = tempfile.mkdtemp(prefix=self._version_prefix, dir=self._versions)
            self._hold(current)
            os.rename(self._building, current)  # onto the empty folder, whose name is ours alone
            self._building = ""
        self._switch(current)
        self._remove_old(current)
        self.directory = current
        self.done = True
        self._send(Synced(current, len(missing), self._fetched))

    @property
    def _version_prefix(self) -> str:
        return os.path.join(self._versions, f"{self._offer.digest[:16]}-")

    def _find_current(self) -> Optional[str]:
        """The version in use, if there is one.

        Raises:
            _CannotSyncError: something that is not ours is in the way.
        """
        if not os.path.lexists(self._to):
            return None
        if not os.path.islink(self._to):
            raise _CannotSyncError(f"{self._to} is there already, and distlaunch did not make it; choose another `to:`")
        version = os.path.join(os.path.dirname(self._to), os.readlink(self._to))
        if os.path.dirname(os.path.abspath(version)) != self._versions:
            raise _CannotSyncError(f"{self._to} is a link that distlaunch did not make; choose another `to:`")
        return version if os.path.isdir(version) else None

    def _compare(self, current: Optional[str]) -> Generator[None, None, set[int]]:
        """Which files the version in use does not have as they were offered."""
        missing = set()
        for index, entry in enumerate(self._offer.files):
            same = current is not None and (yield from self._is_same(entry, os.path.join(current, entry.path)))
            if not same:
                missing.add(index)
        return missing

    def _is_same(self, entry: FileEntry, path: str) -> Generator[None, None, bool]:
        if entry.link:
            return os.path.islink(path) and os.readlink(path) == entry.link
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != entry.size:
            return False
        if bool(os.stat(path).st_mode & 0o100) != entry.executable:
            return False
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                yield
        return digest.hexdigest() == entry.sha256

    def _build(self, current: Optional[str], missing: set[int]) -> Generator[None, None, None]:
        # Links last, so that no file is ever written through one.
        for index, entry in sorted(enumerate(self._offer.files), key=lambda item: bool(item[1].link)):
            path = _inside(self._building, entry.path)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if entry.link:
                _inside(self._building, os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.link)))
                os.symlink(entry.link, path)
                continue
            digest = hashlib.sha256()
            with open(path, "xb") as file:
                if index in missing:
                    yield from self._fetch(index, entry, file, digest.update)
                else:
                    assert current is not None
                    with open(os.path.join(current, entry.path), "rb") as old:
                        while piece := old.read(PIECE):
                            file.write(piece)
                            digest.update(piece)
                            yield
            if digest.hexdigest() != entry.sha256:
                raise _CannotSyncError(f"{entry.path!r} was changed while it was sent; start again")
            os.chmod(path, 0o700 if entry.executable else 0o600)

    def _fetch(
        self, index: int, entry: FileEntry, file: BinaryIO, update: Callable[[bytes], None]
    ) -> Generator[None, None, None]:
        asked = got = 0
        while got < entry.size:
            while asked < entry.size and len(self._awaited) < FETCHES_AT_ONCE:
                fetch = Fetch(index, asked, min(PIECE, entry.size - asked))
                self._awaited.append(fetch)
                self._send(fetch)
                asked += fetch.size
            while not self._pieces:
                yield
            piece, fetch = self._pieces.popleft(), self._awaited.popleft()
            if len(piece) != fetch.size:
                raise _CannotSyncError(f"{entry.path!r} was changed while it was sent; start again")
            file.write(piece)
            update(piece)
            got += len(piece)
            self._fetched += len(piece)

    def _hold(self, version: str) -> bool:
        """Keeps others from removing the version for as long as this process lives; false if one of them is at it."""
        lock = os.open(f"{version}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:  # a file system without locks
            pass
        return os.path.isdir(version)

    def _switch(self, version: str) -> None:
        new = f"{version}.link"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        os.symlink(os.path.join(os.path.basename(self._versions), os.path.basename(version)), new)
        os.replace(new, self._to)

    def _remove_old(self, current: str) -> None:
        for name in os.listdir(self._versions):
            path = os.path.join(self._versions, name)
            if name.startswith(NEW) and time.time() - os.path.getmtime(path) > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
            if name.startswith(NEW) or path == current or not os.path.isdir(path):
                continue
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):  # a run still works in it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                os.unlink(f"{path}.lock")
            os.close(lock)


class _CannotSyncError(Exception):
    """For the user."""


def _inside(folder: str, path: str) -> str:
    """The path within the folder; a controller is not believed, either."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts:
        raise _CannotSyncError(f"{path!r} is not within the folder")
    return os.path.join(folder, path)
