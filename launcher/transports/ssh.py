"""Starts the agent of another machine over SSH: one connection, one command, and frames over its stdin and stdout.

Everything about the way there is the user's own ssh set-up (`ssh_config`); host keys are checked as OpenSSH does in
batch mode (`known_hosts`), before anything is sent.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Iterator, Sequence

import paramiko
from paramiko.pkey import UnknownKeyType

from launcher.transports.base import Deliver, LinkBroken, LinkError, LogMirror
from launcher.transports.frames import Frames
from launcher.transports.known_hosts import KnownKeys, load_known_keys
from launcher.transports.payload import make_payload
from launcher.transports.ssh_config import SshTarget
from worker_entry.messages import Message, TaskExit

CONNECT_S = 15.0
BANNER_S = 60.0
AUTH_S = 30.0
END_WAIT_S = 15.0
"""How long an agent that was asked to end may take: its grace for the tasks, and the way there and back."""
ATTEMPTS = 5
"""Connections tried where sshd drops them because it is busy (its MaxStartups)."""

_KEX = ("curve25519-sha256@libssh.org", "curve25519-sha256", "ecdh-sha2-nistp256")
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
_connecting = threading.BoundedSemaphore(32)

# What goes wrong is told once, by us; without this, a handler of last resort prints it as well.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshTransport:
    """A machine that has sshd and Python. `python` is its interpreter, looked up on its PATH."""

    shares_files = False

    def __init__(self, target: SshTarget, python: str) -> None:
        self._target = target
        self._python = python

    def connect(self, node: str, deliver: Deliver, mirror: LogMirror, lease_s: float) -> SshLink:
        return SshLink(node, self._target, self._python, deliver, mirror, lease_s)


class SshLink:
    """The way to a node, from the first attempt to connect on; connections are made by the link's own thread."""

    def __init__(
        self, node: str, target: SshTarget, python: str, deliver: Deliver, mirror: LogMirror, lease_s: float
    ) -> None:
        self._target = target
        self._python = python
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._began = False
        self._frames = Frames(
            node,
            lambda: self._open("node", BANNER_S, ATTEMPTS),
            deliver,
            mirror,
            lease_s=lease_s,
            reopen=lambda within_s: self._open("attach", within_s, 1),
        )

    @property
    def clock_offset_s(self) -> float:
        return self._frames.clock_offset_s

    def send(self, message: Message) -> None:
        self._frames.send(message)

    def close(self) -> int | None:
        with self._lock:
            self._closing.set()
            if not self._began:
                return 0  # nothing of ours ever came to the node
        self._frames.finish()
        if not self._frames.join(END_WAIT_S):
            self._frames.give_up()
        return 0 if self._frames.ended else None

    def _open(self, verb: str, within_s: float, attempts: int) -> _ChannelStream:
        payload = make_payload()
        with _connecting:
            transport = _connect(self._target, self._closing, within_s, attempts)
            try:
                self._begin()
                channel = transport.open_session(timeout=min(AUTH_S, within_s))
                channel.set_combine_stderr(True)
                channel.exec_command(payload.command)
            except (paramiko.SSHException, EOFError, OSError) as error:
                transport.close()
                raise LinkError(f"{_place(self._target)} starts no command: {error or 'it hung up'}") from None
            except LinkError:
                transport.close()
                raise
        stream = _ChannelStream(transport, channel)
        try:
            stream.write(payload.first_bytes(self._python, verb))
        except OSError as error:
            # Whoever hung up may have said why; the reader finds it.
            if verb != "node":
                raise LinkError(str(error)) from None
        return stream

    def _begin(self) -> None:
        """From here on there may be something of ours on the node, which `close` has to wait for."""
        with self._lock:
            if self._closing.is_set() and not self._began:
                raise LinkError("the run ended before the connection stood")
            self._began = True


class _ChannelStream:
    """One connection with its one command."""

    def __init__(self, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        self._transport = transport
        self._channel = channel

    def read(self, size: int, patience_s: float) -> bytes:
        self._channel.settimeout(patience_s)
        try:
            data = self._channel.recv(size)
        except TimeoutError:
            raise LinkBroken(f"nothing came for {patience_s:.0f} s") from None
        # The command's end is that of the guardian, which ends when nothing is left below it. Only it has a status:
        # a broken connection has none.
        if not data and not (self._channel.status_event.wait(END_WAIT_S) and self._channel.exit_status >= 0):
            raise LinkBroken("the connection broke")
        return data

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def finish(self) -> None:
        self._channel.shutdown_write()

    def abandon(self) -> None:
        self._transport.close()

    def how_ended(self) -> str:
        self.abandon()
        status = self._channel.exit_status
        return f"the agent was ended by {TaskExit(signal=status - 128)}" if status > 128 else "the agent ended"


def _connect(target: SshTarget, cancelled: threading.Event, within_s: float, attempts: int) -> paramiko.Transport:
    """A connection whose host key is trusted and whose user is let in; a busy sshd is asked again.

    No step of it waits for longer than `within_s`.
    """
    known = load_known_keys(target.key_name, target.known_hosts)
    for attempt in range(1, attempts + 1):
        transport = None
        try:
            transport = paramiko.Transport(_dial(target, min(CONNECT_S, within_s)))
            _set_up(transport, known, within_s)
            transport.start_client(timeout=within_s)
            _check_host_key(target, known, transport.get_remote_server_key())
            _authenticate(target, transport)
        except (EOFError, ConnectionResetError, paramiko.SSHException) as error:
            if transport is not None:
                transport.close()
            # No version line, or a connection cut before it: that is how sshd says that it has too many of them.
            busy = "banner" in str(error) or isinstance(error, (EOFError, ConnectionResetError))
            if not busy or attempt == attempts or cancelled.is_set():
                raise LinkError(f"{_place(target)}: {error or 'it hung up'}") from None
        except LinkError:
            if transport is not None:
                transport.close()
            raise
        else:
            return transport
        cancelled.wait(random.uniform(0.1, 0.4) * 2**attempt)  # noqa: S311 - it only spreads the attempts
    raise AssertionError("the last attempt returns or raises")


def _dial(target: SshTarget, within_s: float) -> socket.socket | paramiko.ProxyCommand:
    if target.proxy_command is not None:
        return paramiko.ProxyCommand(target.proxy_command)
    place = _place(target)
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
    return connected


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


def _check_host_key(target: SshTarget, known: KnownKeys, key: paramiko.PKey) -> None:
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
    port = f"-p {target.port} " if target.port != 22 else ""
    raise LinkError(
        f"the host key of {name} is unknown ({shown}); compare the fingerprint on the machine, then: "
        f"ssh-keyscan {port}{target.hostname} >> ~/.ssh/known_hosts"
    )


def _authenticate(target: SshTarget, transport: paramiko.Transport) -> None:
    tried: list[str] = []
    locked: list[str] = []
    for name, key in _keys(target, locked):
        try:
            transport.auth_publickey(target.user, key)
        except paramiko.AuthenticationException:
            tried.append(name)
        else:
            return
    reasons = [f"refused: {', '.join(tried)}"] if tried else ["there is no key to try"]
    reasons += [f"{path} has a passphrase; unlock it with ssh-add" for path in locked]
    raise LinkError(f"{target.user}@{_place(target)} does not let us in; {'; '.join(reasons)}")


def _keys(target: SshTarget, locked: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The user's keys by their names, the agent's first; files that need a passphrase are noted in `locked`."""
    files = [path for path in target.identity_files if path.is_file()]
    if not target.identities_only:
        for key in paramiko.Agent().get_keys():
            yield f"{key.comment or key.get_name()} (ssh-agent)", key
    for path in files:
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError):  # TypeError: how cryptography says the same
            locked.append(str(path))
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType):
            continue  # not a key that we can use; what was tried is told


def _place(target: SshTarget) -> str:
    return f"{target.hostname}:{target.port}"
