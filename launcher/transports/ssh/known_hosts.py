"""The keys that a host may present, from the user's known_hosts files; as strict as OpenSSH in batch mode."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import fnmatch
import functools
import hmac
import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry

from worker_entry.protocol.frozen import dataclass

AUTHORITY, REVOKED = "@cert-authority", "@revoked"
MARKERS = ("", AUTHORITY, REVOKED)
BLANK = " \t"
"""The characters that separate the fields of a line; other white space is part of a field."""
_BLANKS = re.compile(f"[{BLANK}]+")


@dataclass(frozen=True)
class KnownKeys:
    """The keys of one host in the files."""

    trusted: tuple[paramiko.PKey, ...] = ()
    revoked: tuple[paramiko.PKey, ...] = ()
    has_authority: bool = False
    """Whether a certificate authority vouches for the host; paramiko cannot check its certificates."""

    @property
    def accepted(self) -> tuple[paramiko.PKey, ...]:
        """The keys that the host may present."""
        return tuple(key for key in self.trusted if key not in self.revoked)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the trusted keys, in the files' order."""
        return tuple(dict.fromkeys(key.get_name() for key in self.trusted))


def load_known_keys(name: str, files: Iterable[Path]) -> KnownKeys:
    """The keys of a host, by its name in known_hosts (`[host]:port` if the port is not 22)."""
    trusted: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    has_authority = False
    for path in files:
        try:
            facts = path.stat()
            with _reading:  # the threads of all nodes ask at once; only one reads the file
                lines = _read(path, facts.st_mtime_ns, facts.st_size)
        except OSError:  # most users have only one of the files
            continue
        for marker, line in lines.find(name):
            if marker == AUTHORITY:
                has_authority = True
                continue
            entry = HostKeyEntry.from_line(line)
            if entry is not None and entry.key is not None:
                (revoked if marker == REVOKED else trusted).append(entry.key)
    return KnownKeys(tuple(trusted), tuple(revoked), has_authority)


class _Lines:
    """The lines of a file, indexed by host: a file may have thousands of lines, a cluster thousands of hosts."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[str, str]] = []
        self._plain: dict[str, list[int]] = {}
        self._hashed: list[tuple[bytes, bytes, int]] = []
        """Salt, hash and number of a line."""
        self._patterns: list[tuple[list[str], int]] = []
        for line in text.split("\n"):
            marker, rest = _split(line.rstrip("\r")) if line.lstrip(BLANK).startswith("@") else ("", line.rstrip("\r"))
            field, _ = _split(rest)
            if field and not field.startswith(("#", "@")) and marker in MARKERS:
                self._add(field, len(self._lines))
                self._lines.append((marker, " ".join(filter(None, _BLANKS.split(rest)))))

    def _add(self, field: str, number: int) -> None:
        if field.startswith("|1|"):
            with contextlib.suppress(ValueError):
                salt, hashed = (base64.b64decode(part) for part in field.split("|")[2:])
                self._hashed.append((salt, hashed, number))
        elif any(sign in field for sign in "*?!"):
            self._patterns.append((field.lower().split(","), number))
        else:
            for name in field.lower().split(","):
                self._plain.setdefault(name, []).append(number)

    def find(self, name: str) -> Iterator[tuple[str, str]]:
        """The marker and the rest of each line that matches the host, in the file's order."""
        encoded = name.encode()
        found = set(self._plain.get(name.lower(), ()))
        found |= {number for salt, hashed, number in self._hashed if hmac.digest(salt, encoded, "sha1") == hashed}
        found |= {number for patterns, number in self._patterns if _match(patterns, name.lower())}
        return (self._lines[number] for number in sorted(found))


_reading = threading.Lock()


@functools.lru_cache(maxsize=16)
def _read(path: Path, _changed: int, _size: int) -> _Lines:
    return _Lines(path.read_text(encoding="utf-8", errors="replace"))


def remember_key(name: str, key: paramiko.PKey, path: Path) -> None:
    """Adds a host's key to a file, which is created if missing; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # lines of concurrent writers must not mix
        size = os.fstat(descriptor).st_size
        is_whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        line = f"{name} {key.get_name()} {key.get_base64()}\n"
        file.write((line if is_whole else f"\n{line}").encode())


def _split(line: str) -> tuple[str, str]:
    """The first field of a line, and the rest."""
    text = line.lstrip(BLANK)
    length = next((place for place, char in enumerate(text) if char in BLANK), len(text))
    return text[:length], text[length:]


def _match(patterns: Iterable[str], name: str) -> bool:
    """Whether the patterns of a line match the host."""
    if any(_matches(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    # Brackets enclose a name with a port and have no other meaning here.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
