"""How an agent arrives on a node: sent there as text, it takes worker_entry as a zip from stdin and becomes part of it.

Its arguments, after this text itself, are the SHA-256 of the zip and its length; the zip comes over stdin, behind a
line that says what to run of it. It runs before anything of ours is on the node, so it uses no other module of ours.
What it says goes to stdout, before the start marker: the controller keeps it for its error.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import zipfile
from typing import NoReturn


def main() -> None:
    digest, length = sys.argv[2], int(sys.argv[3])
    verb = receive_line()
    archive = receive(length)
    if hashlib.sha256(archive).hexdigest() != digest:
        refuse("worker_entry arrived damaged")
    problems = []
    for folder in folders():
        try:
            place = unpack(archive, private(folder), digest)
            errors = os.open(os.path.join(place, "agent.stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
        else:
            os.dup2(errors, 2)  # so far it went the way of stdout, where from now on only frames belong
            arguments = [sys.executable, os.path.join(place, "worker_entry"), verb]
            os.execv(sys.executable, arguments)  # noqa: S606 - a shell is what we do not want
    refuse(f"no folder to keep worker_entry in: {'; '.join(problems)}")


def refuse(reason: str) -> NoReturn:
    sys.stdout.write(f"distlaunch: {reason}\n")
    sys.stdout.flush()
    sys.exit(1)


def receive_line() -> str:
    """What worker_entry shall be here; read byte by byte, since what follows is not ours to take yet."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            refuse("the connection ended before worker_entry had arrived")
        line += byte
    return line.decode().strip()


def receive(length: int) -> bytes:
    """Exactly so many bytes: what follows them is the agent's."""
    data = b""
    while len(data) < length:
        piece = os.read(0, length - len(data))
        if not piece:
            refuse("the connection ended before worker_entry had arrived")
        data += piece
    return data


def folders() -> list[str]:
    """Where worker_entry may be kept, best first: a home folder can be read-only, or full."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not cache.startswith("/"):
        cache = os.path.expanduser("~/.cache")
    shared = ("/var/tmp", "/tmp", "/dev/shm")  # noqa: S108 - `private` looks at whose the folder is
    return [os.path.join(cache, "distlaunch"), *(os.path.join(top, f"distlaunch-{os.getuid()}") for top in shared)]


def private(folder: str) -> str:
    """The folder, made if missing; refused if anybody else could have put something into it."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    facts = os.lstat(folder)
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022 or os.path.islink(folder):
        raise OSError("others may write to it")
    return folder


def unpack(archive: bytes, folder: str, digest: str) -> str:
    """Every file of the zip, byte for byte; one that is there already is compared, not believed."""
    place = os.path.join(folder, digest)
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for name in files.namelist():
            write(os.path.join(place, name), files.read(name))
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
