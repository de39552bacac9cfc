"""Makes an SSH connection: the way there, the host's key, the user's keys, each as the user's own `ssh` would."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import random
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType

from launcher.transports.base import LinkError
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.known_hosts import KnownKeys, load_known_keys, remember_key

CONNECT_S = 15.0
AUTH_S = 30.0
SHORTEST_STEP_S = 0.5
PROXY_END_S = 2.0
LOOK_S = 1.0
HEARD_LIMIT = 200

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
            way = _dial(target, min(CONNECT_S, left_s))
            transport = paramiko.Transport(way.socket)  # type: ignore[arg-type] # like a socket
            _set_up(transport, known, left_s)
            _greet(target, transport, way, left_s)
            _check_host_key(target, known, transport.get_remote_server_key(), accept_new)
            _authenticate(target, transport)
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


def _greet(target: SshTarget, transport: paramiko.Transport, way: _RawConnection, within_s: float) -> None:
    transport.start_client(timeout=within_s)
    if not transport.initial_kex_done:  # at the end of its time, it just returns
        raise LinkError(f"{place_of(target)} answers, but not as SSH, within {within_s:.0f} s{way.heard()}")


class _Banner:
    """A socket that remembers the first bytes that came: what is no SSH server says there what it is.

    And one that has its reader look up less often: with hundreds of nodes that is half of an idle controller's work.
    """

    def __init__(self, wrapped: socket.socket) -> None:
        self._wrapped = wrapped
        self.first = b""

    def recv(self, size: int) -> bytes:
        data = self._wrapped.recv(size)
        if len(self.first) < HEARD_LIMIT:
            self.first += data[: HEARD_LIMIT - len(self.first)]
        return data

    def settimeout(self, seconds: float) -> None:
        """So often paramiko looks whether it was closed: ten times a second, unless we tell it ourselves."""
        self._wrapped.settimeout(max(seconds, LOOK_S))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@dataclass(frozen=True)
class _RawConnection:
    """A socket to sshd, or to the proxy that leads there."""

    socket: _Banner
    proxy: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None

    def heard(self) -> str:
        """What came first, for the user; nothing if it was SSH."""
        text = self.socket.first.decode(errors="replace").strip()
        return f"; it said {text.splitlines()[0]!r}" if text and not text.startswith("SSH-2.0-") else ""

    def close(self) -> str:
        """Ends it; returns the last line that the proxy wrote to stderr."""
        self.socket.close()
        if self.proxy is None or self.errors is None:
            return ""
        _end_proxy(self.proxy)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@dataclass(frozen=True)
class Connection:
    """A transport, and the way that it goes."""

    transport: paramiko.Transport
    way: _RawConnection

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself
            self.way.socket.shutdown(socket.SHUT_RDWR)  # which wakes paramiko's thread
        self.transport.close()
        self.way.close()


_proxies: set[subprocess.Popen[bytes]] = set()


def _end_proxy(proxy: subprocess.Popen[bytes]) -> None:
    """As OpenSSH does: a proxy need not end by itself when nobody uses it any more."""
    proxy.terminate()
    try:
        proxy.wait(PROXY_END_S)
    except subprocess.TimeoutExpired:
        proxy.kill()
        proxy.wait()
    _proxies.discard(proxy)


@atexit.register
def _end_all_proxies() -> None:
    """Those of connections that were still being made."""
    for proxy in list(_proxies):
        _end_proxy(proxy)


def _dial(target: SshTarget, within_s: float) -> _RawConnection:
    if target.proxy_command is not None:
        return _start_proxy(target.proxy_command)
    place = place_of(target)
    try:
        connected = socket.create_connection((target.hostname, target.port), timeout=within_s)
    except socket.gaierror:
        raise LinkError(f"the name {target.hostname} is not known") from None
    except TimeoutError:
        raise LinkError(f"no answer from {place} within {within_s:.0f} s") from None
    except ConnectionResetError:
        raise
    except OSError as error:
        raise LinkError(f"{(error.strerror or str(error)).lower()}: {place}") from None
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(None)
    return _RawConnection(_Banner(connected))


def _start_proxy(command: str) -> _RawConnection:
    """The proxy between us and sshd: a line of shell, as OpenSSH has it."""
    ours, its = socket.socketpair()
    # Ours to read when it fails; a file never blocks a proxy that has a lot to say.
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the way does
    try:
        proxy = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=errors,
            start_new_session=True,  # the terminal's Ctrl-C is ours to handle
        )
    finally:
        its.close()
    _proxies.add(proxy)
    return _RawConnection(_Banner(ours), proxy, errors)


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


def _authenticate(target: SshTarget, transport: paramiko.Transport) -> None:
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


def place_of(target: SshTarget) -> str:
    return f"{target.hostname}:{target.port}"
