"""Copies a folder of files from the controller to a node, which fetches the files piece by piece."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator
from typing import BinaryIO, Optional

from worker_entry.agent.files.versions import CannotCopyError, Versions
from worker_entry.protocol.messages import Fetch, Message, Noted, Refused, Synced
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.values import FileEntry, Problem

PIECE = 1 << 20
"""How many bytes are hashed or fetched at once; between two pieces, the agent does its other work."""
FETCHES_AT_ONCE = 4
PART = ".distlaunch-part"
"""The name of the file that is being written, in the folder of checkpoints."""


class FolderCopy:
    """One copy. `step` does a part of the work; `send` sends a message to the controller.

    Subclasses do the work in `_copy`, a generator that yields after each small part, and undo unfinished work in
    `_undo`.
    """

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        self.done = False
        self.directory: Optional[str] = None
        """The folder in which tasks run from now on; None if that does not change."""
        self._offer = offer
        self._send = send
        self._awaited: deque[Fetch] = deque()
        self._pieces: deque[bytes] = deque()
        self._fetched = 0
        self._left = 0
        """Bytes that have not been requested yet."""
        self._work = self._copy()

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
        except CannotCopyError as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename or self._offer.to}: {error.strerror}")

    def take(self, piece: Piece, body: bytes) -> None:
        """Accepts a piece that has arrived; ignores a piece that was not requested, or arrives twice."""
        expected = self._awaited[len(self._pieces)] if len(self._pieces) < len(self._awaited) else None
        if expected is not None and (expected.index, expected.offset, expected.checkpoint) == (
            piece.index,
            piece.offset,
            piece.checkpoint,
        ):
            self._pieces.append(body)

    def resume(self) -> None:
        """Requests pieces again over a new connection: pieces requested over the old connection may not arrive."""
        for fetch in list(self._awaited)[len(self._pieces) :]:
            self._send(fetch)

    def abandon(self) -> None:
        """Stops, and undoes what is unfinished."""
        self.done = True
        self._undo()

    def _fail(self, reason: str) -> None:
        self.abandon()
        self._send(Refused([Problem("sync-failed", reason, "")]))

    def _copy(self) -> Generator[None, None, None]:
        raise NotImplementedError

    def _undo(self) -> None:
        raise NotImplementedError

    def _fetch(
        self, index: int, entry: FileEntry, file: BinaryIO, update: Callable[[bytes], None]
    ) -> Generator[None, None, None]:
        """Fetches a file; `update` gets each piece that is written."""
        asked = got = 0
        while got < entry.size:
            while asked < entry.size and len(self._awaited) < FETCHES_AT_ONCE:
                size = min(PIECE, entry.size - asked)
                fetch = Fetch(index, asked, size, self._left, self._offer.checkpoint)
                self._left -= fetch.size
                self._awaited.append(fetch)
                self._send(fetch)
                asked += fetch.size
            while not self._pieces:
                yield
            piece, fetch = self._pieces.popleft(), self._awaited.popleft()
            if len(piece) != fetch.size:
                raise CannotCopyError(f"{entry.path!r} changed while it was sent; start again")
            file.write(piece)
            update(piece)
            got += len(piece)
            self._fetched += len(piece)


def inside(folder: str, path: str) -> str:
    """Joins the path to the folder. The controller's paths are checked, not trusted."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts:
        raise CannotCopyError(f"{path!r} is outside the folder that was sent")
    return os.path.join(folder, path)


class ProgramCopy(FolderCopy):
    """Copies a version of the program's folder. Versions are side by side (`versions`); a link names the current one.

    A new version is built in a separate folder, from unchanged files of the last version and from fetched files. Every
    file is checked by its hash; then the version gets its name, and the link is switched. So a task never sees an
    incomplete version, and a running task keeps its version.
    """

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        super().__init__(offer, send)
        self._versions = Versions(offer.to)
        self._building = ""

    def _undo(self) -> None:
        if self._building:
            shutil.rmtree(self._building, ignore_errors=True)

    def _copy(self) -> Generator[None, None, None]:
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
            path = inside(self._building, entry.path)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if entry.link:
                inside(self._building, os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.link)))
                os.symlink(entry.link, path)
                continue
            old = os.path.join(current, entry.path) if current is not None and index not in missing else None
            if old is None or not (yield from self._take_over(old, path, entry)):
                self._left += 0 if index in missing else entry.size
                missing.add(index)
                yield from self._receive(index, path, entry)
            os.chmod(path, 0o700 if entry.executable else 0o600)

    def _take_over(self, old: str, path: str, entry: FileEntry) -> Generator[None, None, bool]:
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
            raise CannotCopyError(f"{entry.path!r} changed while it was sent; start again")


class CheckpointCopy(FolderCopy):
    """Replaces the checkpoint files whose size or time differs; leaves all other files alone.

    A node keeps its checkpoints if one of these files is newer than all offered files: then the nodes share the disk,
    or the node has saved since the files were collected.
    """

    def _copy(self) -> Generator[None, None, None]:
        folder, files = os.path.expanduser(self._offer.to), self._offer.files
        newest = max((entry.changed for entry in files), default=0)
        places = [inside(folder, entry.path) for entry in files]
        facts = [_changed(place) for place in places]
        if any(changed > newest for changed, _ in facts):
            self._end(folder, 0, newer=True)
            return
        missing = [number for number, entry in enumerate(files) if facts[number] != (entry.changed, entry.size)]
        self._left = sum(files[number].size for number in missing)
        os.makedirs(folder, exist_ok=True)  # with the default mode, because it is the user's own folder
        for number in missing:
            yield from self._replace(number, places[number], files[number])
        self._end(folder, len(missing))

    def _replace(self, number: int, place: str, entry: FileEntry) -> Generator[None, None, None]:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        part = self._part
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        with open(part, "xb") as file:
            yield from self._fetch(number, entry, file, lambda _: None)
        os.utime(part, ns=(entry.changed, entry.changed))
        os.replace(part, place)

    @property
    def _part(self) -> str:
        return os.path.join(os.path.expanduser(self._offer.to), PART)

    def _undo(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part)

    def _end(self, folder: str, fetched: int, *, newer: bool = False) -> None:
        self.done = True
        self._send(Synced(folder, fetched, self._fetched, checkpoint=True, newer=newer))


def _changed(path: str) -> tuple[int, int]:
    """When the file was changed, in nanoseconds, and its size; negative if there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return -1, -1
    return facts.st_mtime_ns, facts.st_size


def make_copy(offer: Offer, send: Callable[[Message], None]) -> FolderCopy:
    """Returns the copy that carries out the offer."""
    return CheckpointCopy(offer, send) if offer.checkpoint else ProgramCopy(offer, send)
