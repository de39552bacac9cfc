"""Real sshd daemons on loopback addresses, and an ssh configuration that knows them by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.harness.hosts import loopback
from tests.harness.witness import wait_until

SSHD = "/usr/sbin/sshd"
PORT = 22022
QUIET = {"LogLevel": "QUIET"}


def skip_without_openssh() -> None:
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("OpenSSH is not installed")


@dataclass(frozen=True)
class Hosts:
    """Hosts by name, all on one port. With `env`, `ssh` and so distlaunch use the configuration for these hosts."""

    folder: Path
    env: Mapping[str, str]
    addresses: Mapping[str, str]
    port: int

    @property
    def home(self) -> Path:
        """The home folder that all hosts share."""
        return self.folder / "home"

    def node_files(self, run_id: str) -> Path:
        """Where the agents keep a run's files."""
        return self.home / ".local" / "state" / "distlaunch" / "nodes" / run_id

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def trust(self, key: str = "host_key") -> None:
        """Writes a key for each host into known_hosts: the true one, or another."""
        text = (self.folder / f"{key}.pub").read_text()
        self.known_hosts.write_text("".join(f"{self.known_name(host)} {text}" for host in self.addresses))

    def known_name(self, host: str) -> str:
        """The host's name in known_hosts."""
        return f"[{self.addresses[host]}]:{self.port}"

    def write_spec(self, rest: str, *, python: str = sys.executable) -> str:
        """Writes a spec of one worker on each host; returns its path."""
        path = self.folder / "spec.yaml"
        nodes = "".join(f"  - {{host: {host}, python: {python}}}\n" for host in self.addresses)
        path.write_text(f"nodes:\n{nodes}{rest}")
        return str(path)


def make_addresses(subnet: int = 0, names: Iterable[str] = ("gpu-a", "gpu-b")) -> dict[str, str]:
    """Addresses for hosts of these names, which no other test process uses."""
    return {name: loopback.address(subnet, number) for number, name in enumerate(names, 2)}


def make_hosts(folder: Path, addresses: Mapping[str, str] | None = None, port: int = PORT) -> Hosts:
    """Makes the keys and the user's configuration; `running_sshd` starts the hosts."""
    addresses = addresses if addresses is not None else make_addresses()
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    config = folder / "config"
    config.write_text(
        "".join(f"Host {host}\n  HostName {address}\n" for host, address in addresses.items())
        + f"Host *\n  Port {port}\n  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n"
        + f"  UserKnownHostsFile {folder / 'known_hosts'}\n  GlobalKnownHostsFile none\n"
    )
    # A wrapper passes -F, because OpenSSH finds a user's configuration by the password file, not by HOME.
    (folder / "home").mkdir()
    tools = folder / "bin"
    tools.mkdir()
    wrapper = tools / "ssh"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {folder}/ssh.log\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    return Hosts(folder, {"PATH": f"{tools}:{os.environ['PATH']}"}, addresses, port)


@contextlib.contextmanager
def running_hosts(folder: Path, options: Mapping[str, object] | None = None) -> Iterator[Hosts]:
    """Two hosts, with these sshd options in addition to the usual ones; stops the hosts at the end."""
    hosts = make_hosts(folder)
    with contextlib.ExitStack() as stack:
        for address in hosts.addresses.values():
            stack.enter_context(running_sshd(hosts, address, options=options))
        yield hosts


@contextlib.contextmanager
def running_sshd(
    hosts: Hosts,
    *addresses: str,
    options: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    around: Sequence[str] = (),
) -> Iterator[None]:
    """One daemon, run by the user of the tests; stops it at the end.

    Args:
        hosts: the hosts whose keys the daemon uses.
        addresses: the addresses on which it listens.
        options: sshd options, added to the usual ones or replacing them.
        env: variables of sessions, added to the usual ones or replacing them.
        around: the words of a command that runs the daemon.
    """
    daemon = subprocess.Popen([*around, *_daemon(hosts, addresses, options or {}, env or {})])

    def is_settled() -> bool:
        return daemon.poll() is not None or all(_answers(address, hosts.port) for address in addresses)

    try:
        wait_until(is_settled, "sshd answers")
        assert daemon.poll() is None, "sshd did not start"
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def sessions() -> list[psutil.Process]:
    """The processes in which the test's own daemons serve connections."""
    me = psutil.Process()
    below = {}
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "sshd":
                below[process.pid] = process
    daemons = {process.pid for process in me.children()}
    return [process for pid, process in below.items() if pid not in daemons]


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def _daemon(hosts: Hosts, addresses: Sequence[str], options: Mapping[str, object], env: Mapping[str, str]) -> list[str]:
    folder = hosts.folder
    measuring = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    # A node must not write into the home folder of the user who runs the tests.
    session = {"HOME": str(hosts.home), **measuring, **env}
    usual = {
        "HostKey": folder / "host_key",
        "Port": hosts.port,
        "AuthorizedKeysFile": folder / "user_key.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "UseDNS": "no",
        "SetEnv": " ".join(f"{name}={value}" for name, value in session.items()),
    }
    words = [f"ListenAddress={address}" for address in addresses]
    words += [f"{name}={value}" for name, value in {**usual, **options}.items()]
    return [SSHD, "-D", "-e", "-f", "/dev/null", *(part for word in words for part in ("-o", word))]


def send_to_sessions(signum: int) -> None:
    found = sessions()
    assert found
    for process in found:
        process.send_signal(signum)
