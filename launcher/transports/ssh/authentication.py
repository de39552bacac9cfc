"""Lets the user in: the keys of the user's agent and files, tried as the user's own `ssh` tries them."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType

from launcher.transports.base import LinkError
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.raw_connection import place_of


def authenticate(target: SshTarget, transport: paramiko.Transport) -> None:
    tried: list[str] = []
    locked: list[str] = []
    for name, key in _keys(target, locked):
        try:
            transport.auth_publickey(target.user, key)
        except paramiko.BadAuthenticationType as error:
            targets = ", ".join(error.allowed_types) or "nothing"
            raise LinkError(f"{place_of(target)} lets nobody in by a key; it takes only: {targets}") from None
        except paramiko.AuthenticationException:
            tried.append(name)
        else:
            return
    reasons = [f"refused: {', '.join(tried)}"] if tried else ["there is no key to try"]
    reasons += [f"{path} has a passphrase; unlock it with ssh-add" for path in locked]
    raise LinkError(f"{target.user}@{place_of(target)} does not let us in; {'; '.join(reasons)}")


def _keys(target: SshTarget, locked: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The user's keys by their names, the agent's first; files that need a passphrase are noted in `locked`."""
    # Held back to the user's own files, the agent may still unlock one of them.
    allowed = {_public_part(path) for path in target.identity_files} if target.identities_only else None
    for key in _open_agent(target.identity_agent).get_keys():
        if allowed is None or key.get_base64() in allowed:
            yield f"{key.comment or key.get_name()} (ssh-agent)", key
    for path in target.identity_files:
        if not path.is_file():
            continue
        try:
            yield str(path), _load_key(path, path.stat().st_mtime_ns)
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError: how cryptography says the same
            locked.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType):
            continue  # not a key that we can use; what was tried is told


def _load_key(path: Path, changed: int) -> paramiko.PKey:
    """The key of a file, which was `changed` then; loaded once for all nodes: to check one of RSA takes 0.2 s."""
    with _loading:
        return _load_changed_key(path, changed)


_loading = threading.Lock()


@functools.lru_cache(maxsize=64)
def _load_changed_key(path: Path, _changed: int) -> paramiko.PKey:
    return paramiko.PKey.from_path(path)


def _open_agent(path: str | None) -> AgentSSH:
    """The agent at SSH_AUTH_SOCK, or where IdentityAgent says; one without keys if there is none."""
    if path is None:
        return paramiko.Agent()
    agent = AgentSSH()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError, paramiko.SSHException):
        connection.connect(path)
        # What `paramiko.Agent` does with SSH_AUTH_SOCK; it takes no other path, and the stubs do not know it.
        agent._connect(connection)  # type: ignore[attr-defined]
    return agent


def _public_part(path: Path) -> str:
    """The public key of an identity file: itself, or what lies beside it; empty if there is none."""
    public = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        return public.read_text().split()[1]
    return ""
