"""Authenticates the user with the keys of the ssh-agent and of files, in the order of the user's own `ssh`."""

from __future__ import annotations

import contextlib
import functools
import shlex
import socket
import threading
from collections.abc import Iterator, Sequence
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
            methods = ", ".join(error.allowed_types) or "nothing"
            raise LinkError(f"{place_of(target)} does not accept keys; it accepts only: {methods}") from None
        except paramiko.AuthenticationException:
            tried.append(name)
        else:
            return
    reasons = [f"refused: {', '.join(tried)}"] if tried else ["no key to try"]
    if not tried and not locked:
        reasons.append(f"make one with ssh-keygen, then run: {_render_copying(target, tried)}")
    reasons += [f"{path} has a passphrase; unlock it with ssh-add" for path in locked]
    if tried:
        reasons.append(f"to let it in, run: {_render_copying(target, tried)}")
    raise LinkError(f"{target.user}@{place_of(target)} rejects the login; {'; '.join(reasons)}")


def _render_copying(target: SshTarget, tried: Sequence[str]) -> str:
    """The command that lets the user in: it asks for the password, and adds a key that was tried, or else the newest.

    It finds the keys of an ssh-agent by itself, and a jump host only by the name that the user's configuration knows.
    """
    files = [str(path) for path in target.identity_files if str(path) in tried]
    words = ["ssh-copy-id", *(["-i", files[0]] if files else [])]
    words += ["-p", str(target.port)] if target.port != 22 else []
    name = target.hostname if target.proxy_command is None else target.host.rpartition("@")[2]
    return shlex.join([*words, f"{target.user}@{name}"])


def list_keys(target: SshTarget) -> tuple[list[str], list[str]]:
    """The names of the keys that would be tried, and the files whose keys need a passphrase first."""
    locked: list[str] = []
    return [name for name, _ in _keys(target, locked)], locked


def _keys(target: SshTarget, locked: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The user's keys by name, the ssh-agent's first; adds files that need a passphrase to `locked`."""
    # With IdentitiesOnly, the ssh-agent may still hold the key of one of the identity files.
    allowed = {_public_part(path) for path in target.identity_files} if target.identities_only else None
    for key in _open_agent(target.identity_agent).get_keys():
        if allowed is None or key.get_base64() in allowed:
            yield f"{key.comment or key.get_name()} (ssh-agent)", key
    for path in target.identity_files:
        if not path.is_file():
            continue
        try:
            yield str(path), _load_key(path, path.stat().st_mtime_ns)
        except (paramiko.PasswordRequiredException, TypeError):  # cryptography raises TypeError for the same
            locked.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType):
            continue  # not a usable key; the error names the keys that were tried


def _load_key(path: Path, changed: int) -> paramiko.PKey:
    """Loads the key of a file last changed at `changed`, once for all nodes: checking an RSA key takes 0.2 s."""
    with _loading:
        return _load_changed_key(path, changed)


_loading = threading.Lock()


@functools.lru_cache(maxsize=64)
def _load_changed_key(path: Path, _changed: int) -> paramiko.PKey:
    return paramiko.PKey.from_path(path)


def _open_agent(path: str | None) -> AgentSSH:
    """The ssh-agent of SSH_AUTH_SOCK or IdentityAgent; an agent without keys if none answers."""
    if path is None:
        return paramiko.Agent()
    agent = AgentSSH()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError, paramiko.SSHException):
        connection.connect(path)
        # As `paramiko.Agent` does for SSH_AUTH_SOCK; it takes no other path, and the stubs lack this method.
        agent._connect(connection)  # type: ignore[attr-defined]
    return agent


def _public_part(path: Path) -> str:
    """The public key of an identity file, from the file itself or from the .pub file next to it; empty if missing."""
    public = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        return public.read_text().split()[1]
    return ""
