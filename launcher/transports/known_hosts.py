"""Which keys a host may show, by the user's known_hosts files. As strict as OpenSSH in batch mode."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys


@dataclass(frozen=True)
class KnownKeys:
    """What the files say of one name."""

    trusted: tuple[paramiko.PKey, ...] = ()
    revoked: tuple[paramiko.PKey, ...] = ()
    has_authority: bool = False
    """Whether a certificate authority vouches for the host; paramiko cannot check its certificates."""

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the trusted keys, in the files' order."""
        return tuple(dict.fromkeys(key.get_name() for key in self.trusted))


def load_known_keys(name: str, files: Iterable[Path]) -> KnownKeys:
    """The keys of a host, named as known_hosts has it (`[host]:port` where the port is not 22)."""
    trusted: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    has_authority = False
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # most users have but one of the files
            continue
        for line in lines:
            marker, rest = line.split(None, 1) if line.startswith("@") and " " in line else ("", line)
            # The name first: parsing a key is slow, and files can have thousands.
            if not _names(rest.split(None, 1)[0] if rest.strip() else "", name):
                continue
            if marker == "@cert-authority":
                has_authority = True
                continue
            entry = HostKeyEntry.from_line(rest)
            if entry is not None and entry.key is not None:
                (revoked if marker == "@revoked" else trusted).append(entry.key)
    return KnownKeys(tuple(trusted), tuple(revoked), has_authority)


def remember_key(name: str, key: paramiko.PKey, path: Path) -> None:
    """Adds a host's key to a file, which is made if missing; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        size = os.fstat(descriptor).st_size
        is_whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
        # One write, so that two hosts at once do not mix.
        line = f"{name} {key.get_name()} {key.get_base64()}\n"
        file.write((line if is_whole else f"\n{line}").encode())


def _names(field: str, name: str) -> bool:
    """Whether the first field of a line, a hash or a list of patterns, means the host."""
    if field.startswith("|1|"):
        return HostKeys.hash_host(name, field) == field
    patterns = field.split(",")
    if any(_matches(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    # Brackets stand around a name with a port, and mean nothing else here.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
