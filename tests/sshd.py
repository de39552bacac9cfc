"""Real sshd daemons on loopback addresses, for a user whose ssh configuration knows them by name."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.witness import wait_until

SSHD = "/usr/sbin/sshd"
PORT = 22022
HOSTS = {"gpu-a": "127.0.0.2", "gpu-b": "127.0.0.3"}


@dataclass(frozen=True)
class Hosts:
    """Two hosts that run. `env` makes `ssh`, and so distlaunch, use their configuration."""

    folder: Path
    env: Mapping[str, str]

    def node_files(self, run_id: str) -> Path:
        """Where the agents of both hosts keep a run's files: they share a home folder."""
        return self.folder / "home" / ".local" / "state" / "distlaunch" / "nodes" / run_id

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def trust(self) -> None:
        """Writes the hosts' true keys into known_hosts."""
        key = (self.folder / "host_key.pub").read_text()
        self.known_hosts.write_text("".join(f"[{address}]:{PORT} {key}" for address in HOSTS.values()))

    def write_spec(self, rest: str, *, python: str = sys.executable) -> str:
        """A spec of one worker on each host; returns its path."""
        path = self.folder / "spec.yaml"
        nodes = "".join(f"  - {{host: {host}, python: {python}}}\n" for host in HOSTS)
        path.write_text(f"nodes:\n{nodes}{rest}")
        return str(path)


@contextlib.contextmanager
def running_hosts(folder: Path) -> Iterator[Hosts]:
    """Starts the daemons, as the user that runs the tests; stops them at the end."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "user_key", "other_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    config = folder / "config"
    config.write_text(
        "".join(f"Host {host}\n  HostName {address}\n" for host, address in HOSTS.items())
        + f"Host *\n  Port {PORT}\n  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n"
        + f"  UserKnownHostsFile {folder / 'known_hosts'}\n  GlobalKnownHostsFile none\n"
    )
    # OpenSSH finds a user's configuration by the password file, not by HOME.
    (folder / "home").mkdir()
    tools = folder / "bin"
    tools.mkdir()
    wrapper = tools / "ssh"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {folder}/ssh.log\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    daemons = [subprocess.Popen(_daemon(folder, address)) for address in HOSTS.values()]
    try:
        for address in HOSTS.values():
            wait_until(lambda a=address: _answers(a), f"sshd answers on {address}")  # type: ignore[misc]
        yield Hosts(folder, {"PATH": f"{tools}:{os.environ['PATH']}"})
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, PORT), timeout=1):
        return True
    return False


def _daemon(folder: Path, address: str) -> list[str]:
    options = {
        "HostKey": folder / "host_key",
        "ListenAddress": address,
        "Port": PORT,
        "AuthorizedKeysFile": folder / "user_key.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "UseDNS": "no",
        "SetEnv": f"HOME={folder / 'home'}",  # what a node keeps must not land in the home of who runs the tests
    }
    return [SSHD, "-D", "-e", "-f", "/dev/null", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
