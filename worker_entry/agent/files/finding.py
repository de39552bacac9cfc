"""Lists the files that tasks have written; a folder may be large, and its disk may hang."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence

from worker_entry.agent.files.versions import find_unchanged
from worker_entry.protocol.collection import FOUND_LIMIT, FilePattern, FilesFound, FindFiles, FoundFile

PATHS_LIMIT = 8 << 20
"""Characters of all paths in one answer."""
ALWAYS_LEFT_OUT = (".git", "__pycache__")
INODES = (1 << 63) - 1


def find_files(order: FindFiles, cwd: str, runs: str) -> FilesFound:
    """The answer to the order.

    Args:
        order: the order to answer.
        cwd: the folder in which the tasks run.
        runs: the folder of the runs' own files, which is left out.
    """
    root = os.path.realpath(os.path.join(cwd, order.directory))
    since, is_as_sent, is_wanted = order.since * 1e9, find_unchanged(root), _matcher(order.patterns)
    found: list[FoundFile] = []
    length = 0
    try:
        for path, facts in _list_files(root, os.path.realpath(runs)):
            if facts.st_mtime_ns < since or not is_wanted(path) or is_as_sent(path):
                continue
            found.append(FoundFile(path, facts.st_size, max(facts.st_mtime_ns, 0), facts.st_ino & INODES))
            length += len(json.dumps(path))
            if len(found) > FOUND_LIMIT or length > PATHS_LIMIT:
                return FilesFound(order.number, root, [], f"{root} has more than {len(found) - 1:,} files to collect")
    except OSError as error:
        return FilesFound(order.number, root, [], f"{error.filename or root}: {error.strerror}")
    return FilesFound(order.number, root, sorted(found, key=lambda file: file.path))


def _list_files(root: str, left_out: str) -> Iterator[tuple[str, os.stat_result]]:
    """The regular files below the folder; there are none if nothing has made it."""
    if not os.path.isdir(root):
        return
    for folder, folders, names in os.walk(root, onerror=_raise_unless_gone):
        folders[:] = [
            name for name in folders if name not in ALWAYS_LEFT_OUT and os.path.join(folder, name) != left_out
        ]
        for name in names:
            path = os.path.join(folder, name)
            try:
                facts = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(facts.st_mode):
                yield os.path.relpath(path, root), facts


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, PermissionError)):
        raise error


def _matcher(patterns: Sequence[FilePattern]) -> Callable[[str], bool]:
    compiled = [(re.compile(pattern.expression), pattern.included) for pattern in patterns]

    def is_wanted(path: str) -> bool:
        return next((included for expression, included in reversed(compiled) if expression.match(path)), not compiled)

    return is_wanted
