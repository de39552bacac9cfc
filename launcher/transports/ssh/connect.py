"""Makes an SSH connection: socket or proxy, host key, user authentication, each as the user's own `ssh` does."""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import paramiko

from launcher.transports.base import LinkError
from launcher.transports.ssh.authentication import authenticate
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.known_hosts import KnownKeys, load_known_keys, remember_key
from launcher.transports.ssh.raw_connection import RawConnection, dial, place_of
from worker_entry.protocol.frozen import dataclass

CONNECT_S = 15.0
AUTH_S = 30.0
SHORTEST_STEP_S = 0.5

_KEX = ("curve25519-sha256@libssh.org", "curve25519-sha256", "ecdh-sha2-nistp256")
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_BUSY = ("kex_exchange_identification", "Connection reset", "Connection closed by")
"""Messages of OpenSSH's client when a jump host's sshd drops its connection."""

# distlaunch reports errors itself; without this, logging's handler of last resort prints them, too.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def connect(
    target: SshTarget,
    *,
    cancelled: threading.Event,
    within_s: float,
    attempts: int,
    accept_new: Callable[[str], None] | None = None,
) -> Connection:
    """Makes an authenticated connection to a trusted host.

    Args:
        target: the host.
        cancelled: set when the connection is no longer needed.
        within_s: the time limit of each step.
        attempts: the most attempts to connect to a busy sshd.
        accept_new: if given, an unknown host's key is added to known_hosts, and this function gets a message.

    Raises:
        LinkError: no connection could be made.
    """
    if target.other_checks:
        raise LinkError(
            f"{' and '.join(target.other_checks)} in ssh's configuration decides on its host key, and only OpenSSH can "
            "read that; set `connection: openssh`"
        )
    known = load_known_keys(target.key_name, target.known_hosts)
    deadline = time.monotonic() + within_s
    for attempt in range(1, attempts + 1):
        transport = raw = None
        left_s = max(deadline - time.monotonic(), SHORTEST_STEP_S)
        try:
            raw = dial(target, min(CONNECT_S, left_s))
            transport = paramiko.Transport(raw.socket)  # type: ignore[arg-type] # like a socket
            _set_up(transport, known, left_s)
            _greet(target, transport, raw, left_s)
            _check_host_key(target, known, transport.get_remote_server_key(), accept_new)
            authenticate(target, transport)
        except (EOFError, ConnectionResetError, paramiko.SSHException) as error:
            if transport is not None:
                transport.close()
            proxy_error = raw.close() if raw is not None else ""
            # A missing version line, or a connection closed before it, is how sshd refuses too many connections.
            busy = "banner" in str(error) or isinstance(error, (EOFError, ConnectionResetError))
            if proxy_error:  # the proxy knows the reason
                busy = any(sign in proxy_error for sign in _BUSY)
            if not busy or attempt == attempts or cancelled.is_set() or time.monotonic() >= deadline:
                banner = raw.render_banner() if raw is not None else ""
                raise LinkError(
                    f"{place_of(target)}: {proxy_error or str(error) or 'the connection was closed'}{banner}"
                ) from None
        except LinkError:
            if transport is not None:
                transport.close()
            if raw is not None:
                raw.close()
            raise
        else:
            return Connection(transport, raw)
        cancelled.wait(random.uniform(0.1, 0.4) * 2**attempt)  # noqa: S311 - only spreads the attempts
    raise AssertionError("the last attempt returns or raises")


def _greet(target: SshTarget, transport: paramiko.Transport, raw: RawConnection, within_s: float) -> None:
    transport.start_client(timeout=within_s)
    if not transport.initial_kex_done:  # start_client returns silently at its time limit
        raise LinkError(
            f"{place_of(target)} does not speak SSH: no handshake within {within_s:.0f} s{raw.render_banner()}"
        )


@dataclass(frozen=True)
class Connection:
    """An SSH transport and the connection below it."""

    transport: paramiko.Transport
    raw: RawConnection

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have closed it
            self.raw.socket.shutdown(socket.SHUT_RDWR)  # wakes paramiko's thread
        self.transport.close()
        self.raw.close()


def _set_up(transport: paramiko.Transport, known: KnownKeys, within_s: float) -> None:
    """Prefers fast algorithms, and host key types that known_hosts has for this host."""
    transport.banner_timeout, transport.auth_timeout = within_s, min(AUTH_S, within_s)
    options = transport.get_security_options()
    options.kex = _first(options.kex, _KEX)
    options.ciphers = _first(options.ciphers, _CIPHERS)
    rsa = ("rsa-sha2-512", "rsa-sha2-256") if "ssh-rsa" in known.types else ()
    options.key_types = _first(options.key_types, (*known.types, *rsa))


def _first(names: Sequence[str], preferred: Sequence[str]) -> tuple[str, ...]:
    """The names, with the preferred names first."""
    return (*(name for name in preferred if name in names), *(name for name in names if name not in preferred))


def _check_host_key(
    target: SshTarget, known: KnownKeys, key: paramiko.PKey, accept_new: Callable[[str], None] | None
) -> None:
    name, shown = target.key_name, f"{key.get_name()} {key.fingerprint}"
    if key in known.revoked:
        raise LinkError(f"the host key of {name} ({shown}) is revoked")
    if key in known.trusted:
        return
    if known.trusted:
        raise LinkError(
            f"the host key of {name} has changed, or the connection is intercepted ({shown}); if the machine is new, "
            f"run: ssh-keygen -R '{name}'{_name_file(target)}"
        )
    if target.plain_name and key in load_known_keys(target.plain_name, target.known_hosts).accepted:
        return
    if known.has_authority:
        raise LinkError(f"the host key of {name} is certified only by a certificate authority, which is not supported")
    if accept_new is not None and target.known_hosts:
        path = target.known_hosts[0]
        try:
            remember_key(name, key, path)
        except OSError as error:
            raise LinkError(f"the host key of {name} cannot be written to {path}: {error.strerror}") from None
        accept_new(f"the host key of {name} ({shown}) was unknown; added to {path}")
        return
    kind = key.get_name().removeprefix("ssh-").partition("-")[0]
    raise LinkError(
        f"the host key of {name} is unknown ({shown}); compare the fingerprint on the machine "
        f"(`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` there), then run: {_render_addition(target, key)}"
    )


def _name_file(target: SshTarget) -> str:
    """The option of `ssh-keygen` that names the file of host keys, unless that is the usual one."""
    usual = Path.home() / ".ssh" / "known_hosts"
    return f" -f {_quote(target.known_hosts[0])}" if target.known_hosts and target.known_hosts[0] != usual else ""


def _render_addition(target: SshTarget, key: paramiko.PKey) -> str:
    """The command that adds the key to known_hosts, whose folder a new user does not have yet."""
    if target.proxy_command is not None or target.host_key_alias is not None:  # ssh-keyscan has no option for either
        line = f"{target.key_name} {key.get_name()} {key.get_base64()}"
        show = f"echo {shlex.quote(line)}"
    else:
        port = f"-p {target.port} " if target.port != 22 else ""
        show = f"ssh-keyscan {port}{target.hostname}"
    if not target.known_hosts:
        return f"{show} >> ~/.ssh/known_hosts"
    file = target.known_hosts[0]
    make = "" if file.parent.is_dir() else f"mkdir -p -m 700 {_quote(file.parent)} && "
    return f"{make}{show} >> {_quote(file)}"


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
