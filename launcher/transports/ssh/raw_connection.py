"""The socket to a host's sshd, or to the proxy that leads there."""

from __future__ import annotations

import atexit
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from typing import IO, Any

from launcher.transports.base import LinkError
from launcher.transports.ssh.config import SshTarget

PROXY_END_S = 2.0


LOOK_S = 1.0


HEARD_LIMIT = 200


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
class RawConnection:
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


def dial(target: SshTarget, within_s: float) -> RawConnection:
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
    return RawConnection(_Banner(connected))


def _start_proxy(command: str) -> RawConnection:
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
    return RawConnection(_Banner(ours), proxy, errors)


def place_of(target: SshTarget) -> str:
    return f"{target.hostname}:{target.port}"
