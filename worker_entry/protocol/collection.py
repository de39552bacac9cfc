"""Messages that list files written by tasks and transfer them to the controller; a path identifies a file."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import BODY_LIMIT, LARGEST, Count, InnerPath, Items, Line, Path, Text, Within
from worker_entry.protocol.frozen import dataclass

FOUND_LIMIT = 50_000
"""More files indicate a wrong pattern."""

Nanoseconds = Annotated[int, Within(0, 1 << 63)]
"""Since 1970; 0 for an earlier time."""


@dataclass(frozen=True)
class FilePattern:
    """A regular expression for paths; of all patterns that match a path, the last decides whether it is included."""

    expression: Annotated[str, Text(4096)]
    included: bool


@dataclass(frozen=True)
class FindFiles:
    """List the regular files below a directory; links are not followed.

    Answered by FilesFound with the same `number`. `directory`: relative to the folder in which the tasks run. Without
    `patterns`, all files are listed. `since`: in Unix seconds; files that were changed earlier are left out. Also
    left out are unchanged files of the program's folder, and the files of runs.
    """

    number: Count
    directory: Annotated[str, Path()]
    patterns: Annotated[list[FilePattern], Items(1000)]
    since: float


@dataclass(frozen=True)
class FoundFile:
    """A file; `changed`: its modification time. `inode` tells whether nodes see the same file."""

    path: Annotated[str, InnerPath()]
    size: Annotated[int, Within(0, LARGEST)]
    changed: Nanoseconds
    inode: Annotated[int, Within(0, 1 << 63)]


@dataclass(frozen=True)
class FilesFound:
    """The answer to FindFiles: the directory's full path, and its files; `problem`: why there is no list."""

    number: Count
    directory: Annotated[str, Path()]
    files: Annotated[list[FoundFile], Items(FOUND_LIMIT)]
    problem: Line = ""


@dataclass(frozen=True)
class ReadFile:
    """Send `size` bytes of a file from `offset`; `number` and `directory` are those of FindFiles."""

    number: Count
    directory: Annotated[str, Path()]
    path: Annotated[str, Path()]
    offset: Count
    size: Annotated[int, Within(0, BODY_LIMIT)]


@dataclass(frozen=True)
class FileRead:
    """The answer to ReadFile: `length` bytes from `offset` follow the header.

    `size` and `changed` are those of the file at this moment; 0 if it is gone. If the file has become shorter, zeros
    replace the missing bytes.
    """

    number: Count
    path: Annotated[str, Path()]
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]
    size: Annotated[int, Within(0, LARGEST)]
    changed: Nanoseconds
