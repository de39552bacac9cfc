"""Installs worker_entry on a node: the node's Python reads this module from stdin, and the archive behind it.

The interpreter's arguments are the length of this module's text, a digest that names this version of worker_entry, the
length of the archive, and the verb to run. Nothing of distlaunch is on the node yet, so this module imports no other
module of ours. It prints errors to stdout, before the start marker: the controller quotes them.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import sys
import zlib
from typing import NoReturn


def main() -> None:
    digest, length, verb = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    try:
        archive = zlib.decompress(binascii.a2b_base64(receive(length)))  # zlib verifies a checksum
    except (binascii.Error, zlib.error):
        refuse("worker_entry was damaged on the way")
    problems = []
    for folder in folders():
        try:
            place = unpack(archive, private(folder), digest)
            errors = os.open(os.path.join(place, "agent.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
        else:
            os.dup2(errors, 2)  # until here stderr was stdout, which from now on carries frames only
            os.close(errors)
            sys.path.insert(0, place)
            sys.argv[:] = [os.path.join(place, "worker_entry"), verb]
            return
    refuse(f"no folder for worker_entry: {'; '.join(problems)}")


def refuse(reason: str) -> NoReturn:
    sys.stdout.write(f"distlaunch: {reason}\n")
    sys.stdout.flush()
    sys.exit(1)


def receive(length: int) -> bytes:
    """Reads exactly so many bytes: what follows is for the agent."""
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
    shared = ("/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - `private` checks the folder's owner
    return [os.path.join(cache, "distlaunch"), *(os.path.join(top, f"distlaunch-{os.getuid()}") for top in shared)]


def private(folder: str) -> str:
    """Returns the folder, made if missing; raises OSError if another user could have written to it."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    facts = os.lstat(folder)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022 or os.path.islink(folder):
        raise OSError("other users can write to it")
    return folder


def unpack(archive: bytes, folder: str, digest: str) -> str:
    """Writes the archive's files; a file that exists already is compared, not trusted.

    The archive begins with a line of JSON, the files' names and lengths; their content follows.
    """
    place = os.path.join(folder, digest)
    start = archive.index(b"\n") + 1
    for name, length in json.loads(archive[:start]):
        write(os.path.join(place, name), archive[start : start + length])
        start += length
    return place


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
