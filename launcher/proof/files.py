"""Compares the files that an interrupted run has written with those of runs without a fault."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.proof.models import Flaw
from launcher.wording import count_of, shorten
from worker_entry.protocol.frozen import dataclass

TEXTS = (".csv", ".jsonl", ".log", ".tsv", ".txt")
READ_LIMIT = 16 << 20


@dataclass(frozen=True)
class FileFacts:
    """A file's size, and how often each of its lines occurs if it is a text."""

    size: int
    lines: Mapping[str, int] | None = None


Files = Mapping[str, FileFacts]
"""Files by their path in the folder of a run."""


def read_files(folder: Path) -> dict[str, FileFacts]:
    """All files below the folder; links are not followed."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(folder))] = _read(path)
    return found


def _read(path: Path) -> FileFacts:
    size = path.stat().st_size
    if path.suffix not in TEXTS or size > READ_LIMIT:
        return FileFacts(size)
    return FileFacts(size, Counter(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def compare_files(first: Files, second: Files, found: Files) -> Iterator[Flaw]:
    """What is wrong with the files of an interrupted run; `first`, `second`: those of two runs without a fault."""
    known = sorted(first.keys() & second.keys())
    missing = [path for path in known if path not in found]
    if missing:
        yield Flaw(reference="file-lost", message=f"{_name(missing)} {_is(missing)} missing")
    half = [path for path in known if path in found and _is_half(first[path], second[path], found[path])]
    if half:
        yield Flaw(reference="half-file", message=f"{_name(half)} {_is(half)} only half written")
    for path in known:
        lost = _find_lost(first[path], second[path], found.get(path))
        if lost:
            yield Flaw(
                reference="file-lost", message=f"{path} lacks {count_of(len(lost), 'line')}, such as {lost[0][:80]!r}"
            )
        twice = _find_twice(first[path], second[path], found.get(path))
        if twice:
            yield Flaw(
                reference="file-twice",
                message=f"{path} has {count_of(len(twice), 'line')} more than once, such as {twice[0][:80]!r}",
            )


def find_left(first: Files, second: Files, found: Files) -> str:
    """A note about files that only the interrupted run has; empty if there are none."""
    left = sorted(found.keys() - first.keys() - second.keys())
    return f"{_name(left)} {_is(left)} left behind" if left and first.keys() == second.keys() else ""


def _is_half(first: FileFacts, second: FileFacts, found: FileFacts) -> bool:
    return 1 < first.size == second.size and found.size <= first.size // 2


def _find_twice(first: FileFacts, second: FileFacts, found: FileFacts | None) -> list[str]:
    """Rows that the interrupted run wrote more often than the others."""
    return [row for row, usual, count in _compare_rows(first, second, found) if 0 < usual < count]


def _find_lost(first: FileFacts, second: FileFacts, found: FileFacts | None) -> list[str]:
    """Rows that the interrupted run did not write."""
    return [row for row, _, count in _compare_rows(first, second, found) if not count]


def _compare_rows(first: FileFacts, second: FileFacts, found: FileFacts | None) -> Iterator[tuple[str, int, int]]:
    """Each row of a text that both runs without a fault write alike, and how often they and the other run have it."""
    if found is None or found.lines is None or first.lines is None or second.lines is None:
        return
    usual, counts = _count_rows(first.lines), _count_rows(found.lines)
    if usual == _count_rows(second.lines):
        yield from ((row, count, counts[row]) for row, count in usual.items())


def _count_rows(lines: Mapping[str, int]) -> Counter[str]:
    """How often each row occurs, by its first cell, such as an epoch: its other numbers may differ."""
    rows: Counter[str] = Counter()
    for line, count in lines.items():
        rows[line.replace("\t", ",").partition(",")[0]] += count
    return rows


def _name(paths: list[str]) -> str:
    return ", ".join(shorten(paths))


def _is(paths: list[str]) -> str:
    return "is" if len(paths) == 1 else "are"
