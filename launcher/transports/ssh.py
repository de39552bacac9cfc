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

from launcher.transports.base import Deliver, Frames, LinkError, LogMirror
from launcher.transports.known_hosts import KnownKeys, load_known_keys
from launcher.transports.payload import make_payload
from launcher.transports.ssh_config import SshTarget
from worker_entry.messages import Message

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

    def connect(self, node: str, deliver: Deliver, mirror: LogMirror) -> SshLink:
        return SshLink(node, self._target, self._python, deliver, mirror)


class SshLink:
    """The connection to a node, from the first attempt on; it is made by the link's own thread."""

    def __init__(self, node: str, target: SshTarget, python: str, deliver: Deliver, mirror: LogMirror) -> None:
        self._target = target
        self._python = python
        self._closing = threading.Event()
        self._stream: _ChannelStream | None = None
        self._frames = Frames(node, self._open, deliver, mirror)

    def send(self, message: Message) -> None:
        self._frames.send(message)

    def close(self) -> int | None:
        self._closing.set()
        self._frames.finish()
        self._frames.join(END_WAIT_S)
        stream = self._stream
        if stream is None:
            return 0  # nothing of ours ever came to the node
        # The command's end is that of the guardian, which ends when nothing is left below it.
        stream.channel.status_event.wait(END_WAIT_S)
        left = 0 if stream.channel.exit_status >= 0 else None
        stream.transport.close()
        return left

    def _open(self) -> _ChannelStream:
        payload = make_payload()
        with _connecting:
            transport = _connect(self._target, self._closing)
            if self._closing.is_set():  # while we were on the way; nothing has been started
                transport.close()
                raise LinkError("the run ended before the connection stood")
            try:
                channel = transport.open_session(timeout=AUTH_S)
                channel.set_combine_stderr(True)
                channel.exec_command(payload.command)
            except (paramiko.SSHException, EOFError, OSError) as error:
                transport.close()
                raise LinkError(f"{_place(self._target)} starts no command: {error or 'it hung up'}") from None
        self._stream = _ChannelStream(transport, channel)
        self._stream.write(payload.first_bytes(self._python))
        return self._stream


class _ChannelStream:
    def __init__(self, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        self.transport = transport
        self.channel = channel

    def read(self, size: int) -> bytes:
        return self.channel.recv(size)

    def write(self, data: bytes) -> None:
        self.channel.sendall(data)

    def finish(self) -> None:
        self.channel.shutdown_write()


def _connect(target: SshTarget, cancelled: threading.Event) -> paramiko.Transport:
    """A connection whose host key is trusted and whose user is let in; a busy sshd is asked again."""
    known = load_known_keys(target.key_name, target.known_hosts)
    for attempt in range(1, ATTEMPTS + 1):
        transport = None
        try:
            transport = paramiko.Transport(_dial(target))
            _set_up(transport, known)
            transport.start_client(timeout=BANNER_S)
            _check_host_key(target, known, transport.get_remote_server_key())
            _authenticate(target, transport)
        except (EOFError, ConnectionResetError, paramiko.SSHException) as error:
            if transport is not None:
                transport.close()
            # No version line, or a connection cut before it: that is how sshd says that it has too many of them.
            busy = "banner" in str(error) or isinstance(error, (EOFError, ConnectionResetError))
            if not busy or attempt == ATTEMPTS or cancelled.is_set():
                raise LinkError(f"{_place(target)}: {error or 'it hung up'}") from None
        except LinkError:
            if transport is not None:
                transport.close()
            raise
        else:
            return transport
        cancelled.wait(random.uniform(0.1, 0.4) * 2**attempt)  # noqa: S311 - it only spreads the attempts
    raise AssertionError("the last attempt returns or raises")


def _dial(target: SshTarget) -> socket.socket | paramiko.ProxyCommand:
    if target.proxy_command is not None:
        return paramiko.ProxyCommand(target.proxy_command)
    place = _place(target)
    try:
        connected = socket.create_connection((target.hostname, target.port), timeout=CONNECT_S)
    except socket.gaierror:
        raise LinkError(f"the name {target.hostname} is not known") from None
    except TimeoutError:
        raise LinkError(f"no answer from {place} within {CONNECT_S:g} s") from None
    except ConnectionResetError:
        raise
    except OSError as error:
        raise LinkError(f"{(error.strerror or str(error)).lower()}: {place}") from None
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(None)
    return connected


def _set_up(transport: paramiko.Transport, known: KnownKeys) -> None:
    """The fast algorithms first, and first of the host's keys a type that we know one of."""
    transport.banner_timeout, transport.auth_timeout = BANNER_S, AUTH_S
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
