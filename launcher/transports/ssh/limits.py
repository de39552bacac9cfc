"""Finds settings of a host's configuration that OpenSSH supports and paramiko does not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.known_hosts import load_known_keys

SECURITY_KEY = "sk-"
"""The prefix of the types of keys whose private half is on a security key (FIDO)."""


def find_limit(target: SshTarget) -> str:
    """Why paramiko cannot connect to the host; empty if no reason is known."""
    known = load_known_keys(target.key_name, target.known_hosts)
    if known.has_authority and not known.trusted:
        return "a certificate authority vouches for its host key"
    if target.other_checks:
        return f"{' and '.join(target.other_checks)} of ssh decides on its host key"
    if target.pkcs11:
        return "its keys are on a smart card"
    for file in target.identity_files:
        if _is_on_security_key(file):
            return f"the key {file.name} is on a security key"
    return ""


def _is_on_security_key(file: Path) -> bool:
    public = file.with_name(f"{file.name}.pub")
    with contextlib.suppress(OSError):
        return file.exists() and public.read_bytes().startswith(SECURITY_KEY.encode())
    return False
