"""Makes an SSH connection: the way there, the host's key, the user's keys, each as the user's own `ssh` would."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from launcher.transports.base import LinkError
from launcher.transports.ssh.authentication import authenticate
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.known_hosts import KnownKeys, load_known_keys, remember_key
from launcher.transports.ssh.raw_connection import RawConnection, dial, place_of

CONNECT_S = 15.0
AUTH_S = 30.0
SHORTEST_STEP_S = 0.5

_KEX = ("curve25519-sha256@libssh.org", "curve25519-sha256", "ecdh-sha2-nistp256")
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_BUSY = ("kex_exchange_identification", "Connection reset", "Connection closed by")
"""How OpenSSH's client says that a jump host's sshd has dropped it."""

# What goes wrong is told once, by us; without this, a handler of last resort prints it as well.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def connect(
    target: SshTarget,
    *,
    cancelled: threading.Event,
    within_s: float,
    attempts: int,
    accept_new: Callable[[str], None] | None = None,
) -> Connection:
    """A connection whose host key is trusted and whose user is let in.

    Args:
        target: where to.
        cancelled: set when nobody wants the connection any more.
        within_s: no step takes longer.
        attempts: how often a busy sshd is asked.
        accept_new: given, an unknown host's key is written into known_hosts, and this is told so.

    Raises:
        LinkError: there is none.
    """
    known = load_known_keys(target.key_name, target.known_hosts)
    deadline = time.monotonic() + within_s
    for attempt in range(1, attempts + 1):
        transport = way = None
        left_s = max(deadline - time.monotonic(), SHORTEST_STEP_S)
        try:
            way = dial(target, min(CONNECT_S, left_s))
            transport = paramiko.Transport(way.socket)  # type: ignore[arg-type] # like a socket
            _set_up(transport, known, left_s)
            _greet(target, transport, way, left_s)
            _check_host_key(target, known, transport.get_remote_server_key(), accept_new)
            authenticate(target, transport)
        except (EOFError, ConnectionResetError, paramiko.SSHException) as error:
            if transport is not None:
                transport.close()
            said = way.close() if way is not None else ""
            # No version line, or a connection cut before it: that is how sshd says that it has too many of them.
            busy = "banner" in str(error) or isinstance(error, (EOFError, ConnectionResetError))
            if said:  # by the proxy, which knows better
                busy = any(sign in said for sign in _BUSY)
            if not busy or attempt == attempts or cancelled.is_set() or time.monotonic() >= deadline:
                heard = way.heard() if way is not None else ""
                raise LinkError(f"{place_of(target)}: {said or str(error) or 'it hung up'}{heard}") from None
        except LinkError:
            if transport is not None:
                transport.close()
            if way is not None:
                way.close()
            raise
        else:
            return Connection(transport, way)
        cancelled.wait(random.uniform(0.1, 0.4) * 2**attempt)  # noqa: S311 - it only spreads the attempts
    raise AssertionError("the last attempt returns or raises")


def _greet(target: SshTarget, transport: paramiko.Transport, way: RawConnection, within_s: float) -> None:
    transport.start_client(timeout=within_s)
    if not transport.initial_kex_done:  # at the end of its time, it just returns
        raise LinkError(f"{place_of(target)} answers, but not as SSH, within {within_s:.0f} s{way.heard()}")


@dataclass(frozen=True)
class Connection:
    """A transport, and the way that it goes."""

    transport: paramiko.Transport
    way: RawConnection

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself
            self.way.socket.shutdown(socket.SHUT_RDWR)  # which wakes paramiko's thread
        self.transport.close()
        self.way.close()


def _set_up(transport: paramiko.Transport, known: KnownKeys, within_s: float) -> None:
    """The fast algorithms first, and first of the host's keys a type that we know one of."""
    transport.banner_timeout, transport.auth_timeout = within_s, min(AUTH_S, within_s)
    options = transport.get_security_options()
    options.kex = _first(options.kex, _KEX)
    options.ciphers = _first(options.ciphers, _CIPHERS)
    rsa = ("rsa-sha2-512", "rsa-sha2-256") if "ssh-rsa" in known.types else ()
    options.key_types = _first(options.key_types, (*known.types, *rsa))


def _first(names: Sequence[str], preferred: Sequence[str]) -> tuple[str, ...]:
    """The names, those preferred before all others."""
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
            f"the host key of {name} has changed, or somebody is in between ({shown}); if the machine is new: "
            f"ssh-keygen -R '{name}'"
        )
    if known.has_authority:
        raise LinkError(f"the host key of {name} is known by a certificate authority only, which is not supported")
    if accept_new is not None and target.known_hosts:
        path = target.known_hosts[0]
        try:
            remember_key(name, key, path)
        except OSError as error:
            raise LinkError(f"the host key of {name} cannot be written into {path}: {error.strerror}") from None
        accept_new(f"the host key of {name} ({shown}) was unknown, and is now in {path}")
        return
    port = f"-p {target.port} " if target.port != 22 else ""
    file = str(target.known_hosts[0]) if target.known_hosts else "~/.ssh/known_hosts"
    raise LinkError(
        f"the host key of {name} is unknown ({shown}); compare the fingerprint on the machine, then: "
        f"ssh-keyscan {port}{target.hostname} >> {file}"
    )
