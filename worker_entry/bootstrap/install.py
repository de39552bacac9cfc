"""Installs worker_entry on a node: the node's Python reads this module from stdin, and the archive if it is needed.

The interpreter's arguments are the length of this module's text, a digest that names this version of worker_entry, the
length of the archive, and the verb to run. The answer on stdout is `HERE`; if this version is not installed, it is
`MISSING`, which asks for the archive, and then `HERE`. After `HERE`, what follows on stdin is for the verb.

distlaunch may not be on the node yet: in the text that the node reads, `system.ownership` replaces its import, and no
other module of ours is imported. Errors go to stdout, before the start marker; the controller quotes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import NoReturn, Optional

from worker_entry.system.ownership import private, verify_private

HERE, MISSING = b"\x1eworker_entry: here\x1e\n", b"\x1eworker_entry: none\x1e\n"
"""Answers of the same length, so that the controller can read one without a byte of what follows."""
FILES = "files"
"""The name of the JSON file that lists the installed files."""


def main() -> None:
    digest, length, verb = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    place = find(digest)
    if place is None:
        answer(MISSING)
        place = install(receive(length), digest)
    sys.path.insert(0, place)
    sys.argv[:] = [os.path.join(place, "worker_entry"), verb]
    answer(HERE)


def find(digest: str) -> Optional[str]:
    """Where this version is installed; None if it is not, or if one of its files has changed since."""
    for folder in folders():
        with contextlib.suppress(OSError, ValueError, TypeError):
            place = os.path.join(verify_private(folder), digest)
            with open(os.path.join(place, FILES), encoding="utf-8") as stream:
                noted = json.load(stream)
            if [describe(place, name) for name, _, _ in noted] == noted:
                write_errors_to(place)
                return place
    return None


def install(packed: bytes, digest: str) -> str:
    """Unpacks the archive in the first usable folder; returns the path."""
    import binascii
    import zlib

    try:
        archive = zlib.decompress(binascii.a2b_base64(packed))  # zlib verifies a checksum
    except (binascii.Error, zlib.error):
        refuse("worker_entry was damaged on the way")
    problems = []
    for folder in folders():
        try:
            place = unpack(archive, private(folder), digest)
            write_errors_to(place)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
        else:
            return place
    return refuse(f"no folder for worker_entry: {'; '.join(problems)}")


def answer(word: bytes) -> None:
    with contextlib.suppress(OSError):  # the controller is gone; the end of stdin will show it
        os.write(1, word)


def write_errors_to(place: str) -> None:
    """Redirects stderr to a file: until now it may be stdout, which carries frames from now on."""
    errors = os.open(os.path.join(place, "agent.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.close(errors)


def refuse(reason: str) -> NoReturn:
    sys.stdout.write(f"distlaunch: {reason}\n")
    sys.stdout.flush()
    sys.exit(1)


def receive(length: int) -> bytes:
    """Reads exactly `length` bytes: what follows is for the agent."""
    data = b""
    while len(data) < length:
        piece = os.read(0, length - len(data))
        if not piece:
            refuse("the connection ended before worker_entry was complete")
        data += piece
    return data


def folders() -> list[str]:
    """Where worker_entry may be stored, best first: a home folder can be read-only or full."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        cache = os.path.expanduser("~/.cache")
    shared = ("/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - `verify_private` checks the owner
    return [os.path.join(cache, "distlaunch"), *(os.path.join(top, f"distlaunch-{os.getuid()}") for top in shared)]


def unpack(archive: bytes, folder: str, digest: str) -> str:
    """Writes the archive's files, and then their list; a file that exists already is compared, not trusted.

    The archive begins with a line of JSON, the files' names and lengths; their content follows.
    """
    place = os.path.join(folder, digest)
    start = archive.index(b"\n") + 1
    names = []
    for name, length in json.loads(archive[:start]):
        write(os.path.join(place, name), archive[start : start + length])
        start += length
        names.append(name)
    write(os.path.join(place, FILES), json.dumps([describe(place, name) for name in names]).encode())
    return place


def describe(place: str, name: str) -> list[object]:
    """The file's size and time, which change when it is written again or cut short by a crash."""
    facts = os.stat(os.path.join(place, name))
    return [name, facts.st_size, facts.st_mtime_ns]


def write(path: str, content: bytes) -> None:
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        if stream.read() == content:
            return
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


if __name__ == "__main__":
    main()
