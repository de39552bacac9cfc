"""Hosts as separate as machines, for root on Linux: each in its own network namespace, joined by a bridge.

A host has its own addresses, host name, sshd, host key, home folder and mounts. It shares the network's folder, the
interpreter and these sources with the controller, as over a shared file system; it does not see other closed folders.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.transports.ssh.config import as_words
from tests.harness.hosts.sshd import PORT, SSHD
from tests.harness.places import ROOT
from tests.harness.processes import jax
from tests.harness.processes.commands import Ran, distlaunch_command
from tests.harness.witness import wait_until

IP = shutil.which("ip") or "ip"
CONTROLLER = ("10.77.0.1", "fd77::1")
"""The controller's addresses."""
CAN_RUN = os.geteuid() == 0 and shutil.which("ip") is not None and Path(SSHD).exists()
needs_namespaces = pytest.mark.skipif(not CAN_RUN, reason="network namespaces need root, iproute2 and OpenSSH's server")
"""For tests that use a network; `opened_network` skips by itself."""
Run = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Host:
    """One machine. `daemon` is its sshd, whose key and log are in `folder`; `address6` is its other address."""

    name: str
    namespace: str
    device: str
    address: str
    address6: str
    folder: Path
    daemon: subprocess.Popen[bytes]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that runs it on this host."""
        return ["nsenter", f"--target={self.daemon.pid}", "--net", "--uts", "--mount", "--"]

    def node_files(self, run_id: str) -> Path:
        """Where the agent keeps a run's files."""
        return self.home / ".local" / "state" / "distlaunch" / "nodes" / run_id

    def run(self, argv: Sequence[str], *, check: bool = True, timeout: float = 60.0) -> Run:
        """Runs a command here, as root."""
        return subprocess.run(
            [*self.enter, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=check, timeout=timeout
        )

    @contextlib.contextmanager
    def watching(self, first: str, source: str, *arguments: str) -> Iterator[list[str]]:
        """Runs a Python program here in the background; yields a list that gets the program's output at the end.

        The program prints the line `first` when it is ready, and ends with its stdin. `source` is its text, because
        its file may be in a closed folder, which hosts do not see.
        """
        words: list[str] = []
        command = [*self.enter, sys.executable, "-c", source, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{first}\n"
            try:
                yield words
            finally:
                words.append(process.communicate(timeout=60)[0])

    def down(self) -> None:
        """Cuts the host off silently, in both directions."""
        _ip("-n", self.namespace, "link", "set", self.device, "down")

    def up(self) -> None:
        """Undoes `down`."""
        _ip("-n", self.namespace, "link", "set", self.device, "up")

    def block(self, *sources: str) -> None:
        """Drops packets from these addresses (by default, the controller's); the other direction stays open."""
        for source in sources or CONTROLLER:
            self._iptables(source, "-A", "INPUT", "-s", source, "-j", "DROP")

    def unblock(self) -> None:
        """Undoes `block`."""
        for address in (self.address, self.address6):
            self._iptables(address, "-F", "INPUT")

    def destroy(self) -> None:
        """Kills all processes here and removes the host, as a reset would."""
        _remove(self.namespace)
        self.daemon.wait()

    def _iptables(self, address: str, *arguments: str) -> None:
        tool = "ip6tables" if ":" in address else "iptables"
        subprocess.run([IP, "netns", "exec", self.namespace, tool, "-w", *arguments], check=True)


@dataclass(frozen=True)
class Network:
    """The hosts, and the controller, on which `run` and `popen` start commands in `folder`.

    `user` logs in on the hosts with `user_key` in `folder`, which holds `known_hosts` as well. With `env`, `ssh` and
    distlaunch know the hosts by name. `suffix` is part of the system's name for each part of the network.
    """

    folder: Path
    hosts: Mapping[str, Host]
    user: str
    suffix: str
    env: dict[str, str]

    def client(self, folder: Path, config: str = "", identity: str | None = None) -> dict[str, str]:
        """The environment for a separate `ssh`: `config` comes before the network's; `identity` names the key."""
        identity = identity or f"IdentityFile {self.folder}/user_key\nIdentitiesOnly yes\n"
        names = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts.values())
        trust = f"UserKnownHostsFile {self.folder}/known_hosts\nGlobalKnownHostsFile none\n"
        common = f"Host *\n  User {self.user}\n  Port {PORT}\n"
        (folder / "config").write_text(f"{config}\n{names}{common}{trust}{identity}")
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)
        return {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}

    def run(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 120.0) -> Run:
        """Runs a command on the controller to its end; one that takes longer than `timeout` is killed."""
        process = self.popen(argv, env=env, stderr=subprocess.PIPE)
        with process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return Run(process.args, process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stderr: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the controller; the process is the command itself."""
        return subprocess.Popen(
            [IP, "netns", "exec", f"dl-{self.suffix}", *argv],
            cwd=self.folder,
            env={**os.environ, **self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )

    def write_spec(self, rest: str, names: Iterable[str] = (), *, python: str = sys.executable) -> str:
        """Writes a spec of one worker on each host, or on the named ones (names for `ssh`); returns its path."""
        path = self.folder / "spec.yaml"
        nodes = "".join(f"  - {{host: '{name}', python: {python}}}\n" for name in names or self.hosts)
        path.write_text(f"nodes:\n{nodes}{rest}")
        return str(path)


@contextlib.contextmanager
def opened_network(factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A network of two hosts for a module's tests, which are skipped if no network can be made."""
    if not CAN_RUN:
        pytest.skip(needs_namespaces.kwargs["reason"])
    with running_network(factory.mktemp("network")) as started:
        yield started


@contextlib.contextmanager
def running_network(folder: Path, *, count: int = 2, user: str = "root") -> Iterator[Network]:
    """Starts the hosts gpu-a, gpu-b, … in an empty folder; creates a user other than root, with the suffix in its name.

    Everything is removed at the end.
    """
    suffix = secrets.token_hex(3)
    controller, bridge = f"dl-{suffix}", f"dl-{suffix}-bridge"
    folder.chmod(0o755)  # the user on the hosts works here
    Path("/run/sshd").mkdir(exist_ok=True)
    _make_key(folder / "user_key")
    places = [(f"gpu-{_letters(index)}", f"10.77.0.{11 + index}", f"fd77::{11 + index}") for index in range(count)]
    names = [f"{address} {name}\n" for name, *addresses in places for address in addresses]
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(names)}")
    with contextlib.ExitStack() as stack:
        if user != "root":
            user = stack.enter_context(_account(f"{user}-{suffix}"))
        _add_namespace(stack, bridge)
        _ip("-n", bridge, "link", "add", f"b{suffix}", "up", "type", "bridge")
        _add_namespace(stack, controller)
        _join(suffix, controller, f"v{suffix}", CONTROLLER)
        hosts = {}
        for index, (name, *addresses) in enumerate(places):
            namespace, device = f"{controller}-{name}", f"v{suffix}{index}"
            _add_namespace(stack, namespace)
            _join(suffix, namespace, device, addresses)
            daemon = _start_daemon(folder / name, name, namespace, addresses, user)
            hosts[name] = Host(name, namespace, device, addresses[0], addresses[1], folder / name, daemon)
            stack.callback(hosts[name].destroy)
        for host in hosts.values():
            wait_until(lambda h=host: _listens(h), f"sshd of {host.name} listens")  # type: ignore[misc]
        keys = [(host, (host.folder / "host_key.pub").read_text()) for host in hosts.values()]
        known = [f"[{address}]:{PORT} {key}" for host, key in keys for address in (host.address, host.address6)]
        (folder / "known_hosts").write_text("".join(known))
        network = Network(folder, hosts, user, suffix, {})
        network.env.update(network.client(folder))
        yield network


def _letters(index: int) -> str:
    """0 → a, 25 → z, 26 → aa."""
    return (_letters(index // 26 - 1) if index >= 26 else "") + chr(ord("a") + index % 26)


@contextlib.contextmanager
def _account(name: str) -> Iterator[str]:
    """An ordinary user without a password."""
    try:
        subprocess.run(["useradd", "-m", "-s", "/bin/sh", name], check=True)
        # An account without a password is locked, and sshd refuses it; "*" unlocks it, and matches no password.
        subprocess.run(["usermod", "-p", "*", name], check=True)
        yield name
    finally:
        subprocess.run(["userdel", "-r", name], check=True, stderr=subprocess.DEVNULL)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _ip(*arguments: str) -> str:
    return subprocess.run([IP, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def _add_namespace(stack: contextlib.ExitStack, namespace: str) -> None:
    stack.callback(_remove, namespace)
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")


def _remove(namespace: str) -> None:
    """Kills all processes in the namespace, and deletes it."""
    if not Path("/run/netns", namespace).exists():
        return

    def is_empty() -> bool:
        pids = _ip("netns", "pids", namespace).split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not pids

    wait_until(is_empty, f"nothing runs in {namespace}")
    _ip("netns", "del", namespace)


def _join(suffix: str, namespace: str, device: str, addresses: Iterable[str]) -> None:
    """Connects the namespace to the bridge."""
    bridge = f"dl-{suffix}-bridge"
    _ip("-n", namespace, "link", "add", device, "type", "veth", "peer", "name", device, "netns", bridge)
    _ip("-n", bridge, "link", "set", device, "master", f"b{suffix}", "up")
    for address in addresses:
        # Without duplicate address detection, an IPv6 address is usable at once.
        rest = ["/64", "nodad"] if ":" in address else ["/24"]
        _ip("-n", namespace, "addr", "add", address + rest[0], "dev", device, *rest[1:])
    _ip("-n", namespace, "link", "set", device, "up")


def _start_daemon(
    folder: Path, name: str, namespace: str, addresses: Sequence[str], user: str
) -> subprocess.Popen[bytes]:
    """Starts the host's sshd, the first process of the host; all others inherit its mounts and host name."""
    (folder / "home").mkdir(parents=True)
    account = pwd.getpwnam(user)
    os.chown(folder / "home", account.pw_uid, account.pw_gid)
    _make_key(folder / "host_key")
    pythons = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    pythons.append(Path(jax.PYTHON).parents[1])
    script = [
        "set -e",
        f"echo {name} > /proc/sys/kernel/hostname",
        "echo 1 > /proc/sys/net/ipv6/conf/all/keep_addr_on_down",
        f"mount --bind {shlex.quote(str(folder.parent / 'hosts'))} /etc/hosts",
        *_open_up(dict.fromkeys([ROOT, *pythons, folder.parent])),
        'exec "$@"',
    ]
    # `ip netns exec` gives its command a private mount namespace.
    start = [IP, "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", "\n".join(script), "sh"]
    with (folder / "sshd.log").open("wb") as log:
        return subprocess.Popen(
            [*start, *sshd_command(folder, addresses)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def sshd_command(folder: Path, addresses: Iterable[str], *, log_level: str = "INFO") -> list[str]:
    """The sshd of the host with this folder; its log goes to stderr."""
    options = [
        *(f"ListenAddress={address}" for address in addresses),
        f"Port={PORT}",
        f"HostKey={folder}/host_key",
        f"AuthorizedKeysFile={folder.parent}/user_key.pub",
        f"SetEnv=HOME={folder}/home",
        f"LogLevel={log_level}",
        *("PidFile=none", "StrictModes=no", "UsePAM=no", "PasswordAuthentication=no", "UseDNS=no"),
    ]
    return sshd_words(options)


def sshd_words(options: Iterable[str]) -> list[str]:
    """An sshd with these options only; its log goes to stderr."""
    return [SSHD, "-D", "-e", "-f", "/dev/null", *as_words(options)]


def _listens(host: Host) -> bool:
    log = (host.folder / "sshd.log").read_text()
    if host.daemon.poll() is not None:
        raise RuntimeError(f"{host.name} does not start: {log}")
    return log.count("Server listening on") == 2


def _open_up(paths: Iterable[Path]) -> Iterator[str]:
    """Shell lines that let every user reach these paths, in a private mount namespace; the real folders do not change.

    A closed folder above a path is replaced by an open one that contains only the paths.
    """
    parts = [part for path in paths for part in (path.iterdir() if _is_closed(path) else [path])]
    parts = [part for part in parts if part.exists() and any(map(_is_closed, part.parents))]
    closed = {next(parent for parent in reversed(part.parents) if _is_closed(parent)) for part in parts}
    if parts:
        yield 'place() { mkdir -p "${2%/*}"; [ -d "$1" ] && mkdir -p "$2" || touch "$2"; mount --rbind "$1" "$2"; }'
        yield "umask 022; mount -t tmpfs none /mnt"  # holds the parts while the folders above them are replaced
        yield from (f"place {shlex.quote(str(part))} /mnt/{number}" for number, part in enumerate(parts))
        yield from (f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}" for folder in closed)
        yield from (f"place /mnt/{number} {shlex.quote(str(part))}" for number, part in enumerate(parts))
        yield "umount -R /mnt"


def _is_closed(path: Path) -> bool:
    return not path.stat().st_mode & 0o001


def up(network: Network, spec: str, tmp_path: Path, env: dict[str, str] | None = None, timeout: float = 20.0) -> Ran:
    """Runs `distlaunch up` on the controller."""
    directory = tmp_path / "run"
    done = network.run(distlaunch_command("up", "--run-dir", str(directory), spec), env=env, timeout=timeout)
    return Ran(done.returncode, done.stdout, done.stderr, directory)
