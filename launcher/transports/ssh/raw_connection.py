"""The socket to a host's sshd, or to the proxy in front of it."""

from __future__ import annotations

import atexit
import socket
import subprocess
import tempfile
from typing import IO, Any

from launcher import helpers
from launcher.transports.base import LinkError
from launcher.transports.ssh.config import SshTarget
from worker_entry.protocol.frozen import dataclass

PROXY_END_S = 2.0
"""How long a proxy may take to end before it is killed."""
POLL_S = 1.0
"""How often paramiko checks whether its socket was closed."""
BANNER_LIMIT = 200
"""First bytes of a connection that are kept for an error."""
_OTHER_ADDRESS = "if the address is wrong, give another with ssh.hostname"


class _Banner:
    """A socket that keeps the first bytes received, by which a server other than sshd can be recognized.

    It also makes its reader poll less often: with hundreds of nodes, polling is half of an idle controller's work.
    """

    def __init__(self, wrapped: socket.socket) -> None:
        self._wrapped = wrapped
        self.first = b""

    def recv(self, size: int) -> bytes:
        data = self._wrapped.recv(size)
        if len(self.first) < BANNER_LIMIT:
            self.first += data[: BANNER_LIMIT - len(self.first)]
        return data

    def settimeout(self, seconds: float) -> None:
        """Sets how often paramiko polls; its own choice is ten times a second."""
        self._wrapped.settimeout(max(seconds, POLL_S))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@dataclass(frozen=True)
class RawConnection:
    """A socket to sshd, or to the proxy in front of it."""

    socket: _Banner
    proxy: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None

    def render_banner(self) -> str:
        """The first line received, for an error; empty if it was SSH's."""
        text = self.socket.first.decode(errors="replace").strip()
        return f"; it sent {text.splitlines()[0]!r}" if text and not text.startswith("SSH-2.0-") else ""

    def close(self) -> str:
        """Closes the connection; returns the last line that the proxy wrote to stderr."""
        self.socket.close()
        if self.proxy is None or self.errors is None:
            return ""
        _end_proxy(self.proxy)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


_proxies: set[subprocess.Popen[bytes]] = set()


def _end_proxy(proxy: subprocess.Popen[bytes]) -> None:
    """Ends a proxy, as OpenSSH does: an unused proxy may not end on its own."""
    proxy.terminate()
    try:
        proxy.wait(PROXY_END_S)
    except subprocess.TimeoutExpired:
        helpers.kill(proxy)
        proxy.wait()
    _proxies.discard(proxy)


@atexit.register
def _end_all_proxies() -> None:
    """Ends the proxies of unfinished connections."""
    for proxy in list(_proxies):
        _end_proxy(proxy)


def dial(target: SshTarget, within_s: float) -> RawConnection:
    if target.proxy_command is not None:
        return _start_proxy(target.proxy_command)
    place = place_of(target)
    try:
        connected = socket.create_connection((target.hostname, target.port), timeout=within_s)
    except socket.gaierror:
        raise LinkError(
            f"the name {target.hostname} is not known; add it to ~/.ssh/config, or give its address with ssh.hostname"
        ) from None
    except TimeoutError:
        raise LinkError(f"no answer from {place} within {within_s:.0f} s; {_OTHER_ADDRESS}") from None
    except ConnectionResetError:
        raise
    except ConnectionRefusedError:
        raise LinkError(
            f"connection refused: {place}; start sshd there, or give its port with ssh.port; {_OTHER_ADDRESS}"
        ) from None
    except OSError as error:
        raise LinkError(f"{(error.strerror or str(error)).lower()}: {place}; {_OTHER_ADDRESS}") from None
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(None)
    return RawConnection(_Banner(connected))


def _start_proxy(command: str) -> RawConnection:
    """Starts the proxy in front of sshd: a shell command line, as in OpenSSH."""
    ours, its = socket.socketpair()
    # Read when the proxy fails; unlike a pipe, a file never blocks a proxy that writes a lot.
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the connection
    try:
        proxy = helpers.start(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=errors,
        )
    finally:
        its.close()
    _proxies.add(proxy)
    return RawConnection(_Banner(ours), proxy, errors)


def place_of(target: SshTarget) -> str:
    return f"{target.hostname}:{target.port}"
