"""Files that go to other machines and come back.

The program's files are checked before the run starts anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher import helpers
from launcher.errors import UsageError
from launcher.spec.parts import SyncSpec
from launcher.wording import render_duration
from worker_entry.protocol.collection import FilePattern
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Fetch
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import FileEntry

ALWAYS_LEFT_OUT = (".git/", "__pycache__/", "*.pyc")
FILES_LIMIT = 50_000
"""More files indicate a wrong folder."""
SHOWN_LIMIT = 10
WINDOW_S = 10.0
"""The rate is that of the last WINDOW_S seconds."""
SHOWN_NODES = 4


@dataclass(frozen=True)
class Bundle:
    """The folder `root` and its files, sorted by path; the program's, or with `checkpoint` that of a checkpoint."""

    root: Path
    to: str
    entries: tuple[FileEntry, ...]
    checkpoint: bool = False

    @property
    def offer(self) -> Offer:
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(repr(entry).encode("utf-8", "surrogatepass"))
        return Offer(self.to, digest.hexdigest(), list(self.entries), self.checkpoint)

    def read_piece(self, fetch: Fetch) -> tuple[Piece, bytes]:
        """The bytes that a node requests; fewer if the file has shrunk or is gone, which the node detects.

        Raises:
            ValueError: the request exceeds the offer.
        """
        if not 0 <= fetch.index < len(self.entries) or not 0 <= fetch.size <= 1 << 20 or fetch.offset < 0:
            raise ValueError("a Fetch outside the offer")
        try:
            with (self.root / self.entries[fetch.index].path).open("rb") as file:
                data = os.pread(file.fileno(), fetch.size, fetch.offset)
        except OSError:
            data = b""
        return Piece(fetch.index, fetch.offset, len(data), self.checkpoint), data


def make_bundle(sync: SyncSpec, base: Path) -> Bundle:
    """Reads the folder, relative to `base`, and hashes its files.

    Raises:
        UsageError: the folder cannot be sent; the error lists all reasons.
    """
    import pathspec  # needed only by runs that send their program

    root = (base / Path(sync.path).expanduser()).resolve()
    if not root.is_dir():
        raise UsageError(f"sync.path {root} is not a folder")
    left_out = pathspec.GitIgnoreSpec.from_lines([*ALWAYS_LEFT_OUT, *sync.exclude])
    entries: list[FileEntry] = []
    problems: list[str] = []
    for path in sorted(set(_list_files(root))):
        if left_out.match_file(path):
            continue
        try:
            entry = _make_entry(root, path)
        except OSError as error:
            problems.append(f"{path!r} cannot be read: {error.strerror}")
        except ValueError as error:
            problems.append(f"{path!r} {error}")
        else:
            entries += [entry] if entry is not None else []
    if len(entries) > FILES_LIMIT:
        problems.append(f"{len(entries):,} files; the limit is {FILES_LIMIT:,}")
    if problems:
        more = [f"and {len(problems) - SHOWN_LIMIT} more"] if len(problems) > SHOWN_LIMIT else []
        raise UsageError(
            f"the folder {root} cannot be sent",
            evidence=[*problems[:SHOWN_LIMIT], *more],
            hint="exclude them with `sync.exclude`, which takes .gitignore patterns",
        )
    return Bundle(root, sync.to, tuple(entries))


def _list_files(root: Path) -> Iterator[str]:
    """All files below the folder; in a git repository, without ignored ones."""
    if shutil.which("git") is not None:
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        with helpers.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as git:
            listed, _ = git.communicate()
        if git.returncode == 0:
            for name in filter(None, os.fsdecode(listed).split("\0")):
                inner = root / name
                if inner.is_dir() and not inner.is_symlink():  # a nested repository
                    yield from (f"{name.rstrip('/')}/{path}" for path in _list_files(inner))
                else:
                    yield name
            return
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in (".git", *links)]
        for name in (*names, *links):
            yield os.path.relpath(Path(folder) / name, root)


def _make_entry(root: Path, path: str) -> FileEntry | None:
    """The entry of the file as it is now; None if the file is gone.

    Raises:
        ValueError: the file cannot be sent; the text says why.
    """
    place = root / path
    try:
        facts = place.lstat()
    except (FileNotFoundError, NotADirectoryError):  # git still lists it
        return None
    if stat.S_ISLNK(facts.st_mode):
        target = str(place.readlink())
        end = os.path.normpath(place.parent / target)
        if Path(target).is_absolute() or not Path(end).is_relative_to(root):
            raise ValueError(f"is a link to {target}, outside the folder")
        return FileEntry(path, link=target)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("is neither a file nor a link")
    with place.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return FileEntry(path, facts.st_size, digest.hexdigest(), bool(facts.st_mode & stat.S_IXUSR))


def compile_patterns(patterns: Sequence[str]) -> tuple[FilePattern, ...]:
    """.gitignore's patterns as regular expressions, so that nodes need no library for them."""
    import pathspec  # needed only by runs that collect files

    spec = pathspec.GitIgnoreSpec.from_lines(patterns)
    return tuple(
        FilePattern(pattern.regex.pattern, bool(pattern.include)) for pattern in spec.patterns if pattern.regex
    )


@dataclass(frozen=True)
class Transfer:
    """One node's transfer: bytes sent, total bytes, and bytes per second, 0 if unknown."""

    sent: int
    total: int
    rate: float

    def __str__(self) -> str:
        left_s = f", {render_duration((self.total - self.sent) / self.rate)} left" if self.rate else ""
        rate = f", {render_size(self.rate)}/s" if self.rate else ""
        return f"{render_size(self.sent)} of {render_size(self.total)}{rate}{left_s}"


class Transfers:
    """The transfers of one attempt, from the nodes' requests."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def note(self, node: str, fetch: Fetch, now: float) -> None:
        """Notes a request; `now`: monotonic seconds."""
        total = self._totals.setdefault(node, fetch.left)
        samples = self._samples.setdefault(node, deque())
        samples.append((now, max(total - fetch.left, 0)))
        while samples[0][0] < now - WINDOW_S and len(samples) > 2:
            samples.popleft()

    def end(self, node: str) -> None:
        """Forgets a node that has all files."""
        self._totals.pop(node, None)

    @property
    def current(self) -> dict[str, Transfer]:
        """The unfinished transfers, by node."""
        return {node: self._make(node, total) for node, total in self._totals.items()}

    def render(self) -> str:
        """`gpu-a 120 MiB of 300 MiB, 24 MiB/s, 7.5 s left; gpu-b …`, the slowest first; empty if there is none."""
        current = sorted(self.current.items(), key=lambda item: item[1].sent / max(item[1].total, 1))
        shown = [f"{node} {transfer}" for node, transfer in current[:SHOWN_NODES]]
        more = [f"and {len(current) - SHOWN_NODES} more"] if len(current) > SHOWN_NODES else []
        return "; ".join([*shown, *more])

    def _make(self, node: str, total: int) -> Transfer:
        samples = self._samples[node]
        (first, before), (last, sent) = samples[0], samples[-1]
        return Transfer(sent, total, (sent - before) / (last - first) if last > first else 0.0)
