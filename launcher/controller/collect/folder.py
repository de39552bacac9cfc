"""A folder of files from a node: a file gets its name once it is complete, and an interrupted transfer continues."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from worker_entry.protocol.collection import FoundFile
from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.units import render_size

PARTS = ".parts"
"""The folder of incomplete files, in the folder of all collected files."""


RESERVE = 1 << 30
"""Bytes of the disk that stay free for the run's own files."""


class CannotFetchError(Exception):
    """The files cannot be fetched; the text says why."""


@dataclass(frozen=True)
class _Open:
    """A file that is being written."""

    file: FoundFile
    part: Path
    descriptor: int


class CollectedFolder:
    """The files of one folder of one node. Its methods raise OSError if they cannot write.

    Args:
        root: the folder for complete files.
        parts: the folder for incomplete files; on the same disk.
        origin: names the node and its folder; an incomplete file belongs to one version of one file of one origin.
        before: an earlier version of the folder, from which unchanged files are taken over.
    """

    def __init__(self, root: Path, parts: Path, origin: str, before: Path | None = None) -> None:
        self.root = root
        self._parts = parts
        self._origin = origin
        self._before = before
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    def has(self, file: FoundFile) -> bool:
        """Whether the folder has this version of the file, by its size and time."""
        place = self.root / file.path
        if _is_version(place, file):
            return True
        if self._before is None or not _is_version(self._before / file.path, file):
            return False
        self._make_folders(place)
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
        earlier = self._before / file.path
        try:
            os.link(earlier, place)
        except OSError:  # a disk without hard links
            shutil.copy2(earlier, place)
        return True

    def check_space(self, size: int) -> None:
        """Raises CannotFetchError if the disk has no room for this many bytes."""
        make_private_directory(str(self._parts))
        free = shutil.disk_usage(self._parts).free - RESERVE
        if size > max(free, 0):
            raise CannotFetchError(
                f"{render_size(size)} have no room on the disk of {self._parts.parent}, which has "
                f"{render_size(free + RESERVE)} free"
            )

    def begin(self, file: FoundFile) -> int:
        """Opens the file; returns how many of its bytes are here from an earlier transfer."""
        make_private_directory(str(self._parts))
        version = f"{self._origin}\0{file.path}\0{file.size}\0{file.changed}"
        part = self._parts / hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o600)
        with self._lock:
            self._open[file.path] = _Open(file, part, descriptor)
        size = os.fstat(descriptor).st_size
        if size > file.size:
            os.ftruncate(descriptor, 0)
            return 0
        return size

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Appends to an open file; ignores data that does not continue the file. Any thread may call it."""
        with self._lock:
            opened = self._open.get(path)
            if opened is None:
                return
            size = os.fstat(opened.descriptor).st_size
            if offset != size or size + len(data) > opened.file.size:
                return
            while data:
                data = data[os.write(opened.descriptor, data) :]

    def finish(self, path: str) -> bool:
        """Gives a file its name; returns False if it is incomplete."""
        opened = self._close(path)
        if opened is None or opened.part.stat().st_size != opened.file.size:
            return False
        place = self.root / path
        self._make_folders(place)
        os.utime(opened.part, ns=(opened.file.changed, opened.file.changed))
        opened.part.replace(place)
        return True

    def drop(self, path: str) -> None:
        """Closes a file and removes its incomplete data, which mixes two versions."""
        opened = self._close(path)
        if opened is not None:
            opened.part.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes all files; incomplete files stay."""
        for path in [*self._open]:
            self._close(path)

    def keep_only(self, files: Collection[FoundFile]) -> None:
        """Removes files that the node no longer has."""
        kept = {self.root / file.path for file in files}
        for folder, _, names in os.walk(self.root):
            for name in names:
                if (path := Path(folder, name)) not in kept:
                    path.unlink()

    def _close(self, path: str) -> _Open | None:
        with self._lock:
            opened = self._open.pop(path, None)
            if opened is not None:
                os.close(opened.descriptor)
        return opened

    def _make_folders(self, place: Path) -> None:
        """Makes the parent folders of a file; removes a file that is in the place of one of them."""
        for folder in [above for above in place.parents if above.is_relative_to(self.root)][::-1]:
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                folder.unlink()
        make_private_directory(str(place.parent))


def publish(new: Path, place: Path) -> None:
    """Replaces the folder at `place` with a complete one; `restore` undoes this if it was interrupted."""
    old = _old(place)
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore(place: Path) -> None:
    """Undoes an interrupted `publish`."""
    with contextlib.suppress(OSError):
        if not place.exists() and _old(place).is_dir():
            _old(place).rename(place)


def _old(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")


def _is_version(place: Path, file: FoundFile) -> bool:
    try:
        facts = place.lstat()
    except OSError:
        return False
    return (facts.st_size, facts.st_mtime_ns) == (file.size, file.changed)
