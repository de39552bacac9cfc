"""Copies the program's folder to a node: versions side by side (see `copy_versions`), and a link to the current one.

A new version is built in a separate folder, from unchanged files of the last version and from fetched files. Every file
is checked by its hash; then the version gets its name, and the link is switched. So a task never sees an incomplete
version, and a running task keeps its version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator
from typing import BinaryIO, Optional

from worker_entry.agent.copy_versions import NotOursError, Versions
from worker_entry.protocol.messages import Fetch, Message, Noted, Refused, Synced
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.values import FileEntry, Problem

PIECE = 1 << 20
"""How many bytes are hashed or fetched at once; between two pieces, the agent does its other work."""
FETCHES_AT_ONCE = 4


class ProgramCopy:
    """Copies one version to this node. `step` does a part of the work; `send` sends a message to the controller."""

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        self.done = False
        self.directory: Optional[str] = None
        """The folder of the complete version; None until then."""
        self._offer = offer
        self._send = send
        self._versions = Versions(offer.to)
        self._building = ""
        self._awaited: deque[Fetch] = deque()
        self._pieces: deque[bytes] = deque()
        self._fetched = 0
        self._left = 0
        """Bytes that are still to be asked for."""
        self._work = self._copy_version()

    @property
    def waits(self) -> bool:
        """Whether no work is possible until another piece arrives."""
        return self.done or (bool(self._awaited) and not self._pieces)

    def step(self) -> None:
        """Does the next small part of the work."""
        if self.waits:
            return
        try:
            next(self._work, None)
        except (NotOursError, _CannotSyncError) as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename or self._offer.to}: {error.strerror}")

    def take(self, piece: Piece, body: bytes) -> None:
        """Accepts a piece that has arrived; ignores a piece that was not requested, or arrives twice."""
        expected = self._awaited[len(self._pieces)] if len(self._pieces) < len(self._awaited) else None
        if expected is not None and (expected.index, expected.offset) == (piece.index, piece.offset):
            self._pieces.append(body)

    def resume(self) -> None:
        """Requests pieces again over a new connection: pieces requested over the old connection may not arrive."""
        for fetch in list(self._awaited)[len(self._pieces) :]:
            self._send(fetch)

    def abandon(self) -> None:
        """Stops, and removes an unfinished version."""
        self.done = True
        if self._building:
            shutil.rmtree(self._building, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self.abandon()
        self._send(Refused([Problem("sync-failed", reason, "")]))

    # --- the work: it yields after each small part ---

    def _copy_version(self) -> Generator[None, None, None]:
        current = self._versions.find_current()
        missing = yield from self._compare(current)
        self._left = sum(self._offer.files[index].size for index in missing)
        if current is None or missing or not self._versions.is_of(current, self._offer.digest):
            self._building = self._versions.make_building()
            yield from self._build(current, missing)
            self._versions.release(current)
            current = self._versions.finish(self._building, self._offer.digest, self._offer.files)
            self._building = ""
        self._versions.switch(current)
        for kept in self._versions.clean(current):
            if kept is not None:
                self._send(Noted(f"files that tasks wrote to an old version of {self._offer.to} are kept in {kept}"))
            yield
        self.directory = current
        self.done = True
        self._send(Synced(current, len(missing), self._fetched))

    def _compare(self, current: Optional[str]) -> Generator[None, None, set[int]]:
        """Finds the indexes of offered files that are missing or different in the current version."""
        missing = set()
        for index, entry in enumerate(self._offer.files):
            try:
                same = current is not None and (yield from self._is_same(entry, os.path.join(current, entry.path)))
            except OSError:  # a task of another run is changing it
                same = False
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
        # Links come last, so that no file is ever written through a link.
        for index, entry in sorted(enumerate(self._offer.files), key=lambda item: bool(item[1].link)):
            path = _inside(self._building, entry.path)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if entry.link:
                _inside(self._building, os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.link)))
                os.symlink(entry.link, path)
                continue
            old = os.path.join(current, entry.path) if current is not None and index not in missing else None
            if old is None or not (yield from self._copy(old, path, entry)):
                self._left += 0 if index in missing else entry.size
                missing.add(index)
                yield from self._receive(index, path, entry)
            os.chmod(path, 0o700 if entry.executable else 0o600)

    def _copy(self, old: str, path: str, entry: FileEntry) -> Generator[None, None, bool]:
        """Copies an unchanged file; false if a task of another run has changed the file since the comparison."""
        digest = hashlib.sha256()
        try:
            with open(old, "rb") as source, open(path, "xb") as file:
                while piece := source.read(PIECE):
                    file.write(piece)
                    digest.update(piece)
                    yield
        except FileNotFoundError:
            return False
        if digest.hexdigest() != entry.sha256:
            os.unlink(path)
            return False
        return True

    def _receive(self, index: int, path: str, entry: FileEntry) -> Generator[None, None, None]:
        digest = hashlib.sha256()
        with open(path, "xb") as file:
            yield from self._fetch(index, entry, file, digest.update)
        if digest.hexdigest() != entry.sha256:
            raise _CannotSyncError(f"{entry.path!r} changed while it was sent; start again")

    def _fetch(
        self, index: int, entry: FileEntry, file: BinaryIO, update: Callable[[bytes], None]
    ) -> Generator[None, None, None]:
        asked = got = 0
        while got < entry.size:
            while asked < entry.size and len(self._awaited) < FETCHES_AT_ONCE:
                fetch = Fetch(index, asked, min(PIECE, entry.size - asked), self._left)
                self._left -= fetch.size
                self._awaited.append(fetch)
                self._send(fetch)
                asked += fetch.size
            while not self._pieces:
                yield
            piece, fetch = self._pieces.popleft(), self._awaited.popleft()
            if len(piece) != fetch.size:
                raise _CannotSyncError(f"{entry.path!r} changed while it was sent; start again")
            file.write(piece)
            update(piece)
            got += len(piece)
            self._fetched += len(piece)


class _CannotSyncError(Exception):
    """The folder cannot be copied; the message is shown to the user."""


def _inside(folder: str, path: str) -> str:
    """Joins the path to the folder. The controller's paths are checked, not trusted."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts:
        raise _CannotSyncError(f"{path!r} is outside the program's folder")
    return os.path.join(folder, path)
