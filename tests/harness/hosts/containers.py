"""Clusters of real containers, made by Compose from the project's own files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shlex
import socket
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.harness.available import find_program
from tests.harness.places import ROOT
from tests.harness.processes.background import BackgroundRun
from tests.harness.witness import wait_until

COMPOSE_FILE = ROOT / "docker" / "compose.yaml"
IMAGE = "distlaunch-test"
VERSIONS = {"v1": ["docker-compose"], "v2": ["docker", "compose"]}
BUILD_S = 1200.0
UP_S = 120.0
NO_COMMAND_LINE = re.compile(r"\[[^]]*\]( <defunct>)?")
"""What `ps` shows of a process that is ending, or has ended and is not yet waited for."""


def output_of(*argv: str, timeout_s: float = UP_S, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """The output of a command; fails the test if the command fails."""
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=timeout_s, check=False, env={**os.environ, **(env or {})}, cwd=cwd
    )
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@functools.cache
def compose_versions() -> tuple[str, ...]:
    """The installed versions of Compose, the current one last."""
    return tuple(name for name, command in VERSIONS.items() if find_program(*command, "version"))


def skip_without_docker() -> None:
    if find_program("docker", "info") is None:
        pytest.skip("no Docker engine answers")
    if not compose_versions():
        pytest.skip("Docker has no Compose")


@functools.cache
def build_image() -> str:
    """Builds the image as README says, unless its layers are there already; returns its name.

    DISTLAUNCH_DOCKER_BUILD holds more arguments for `docker build`, such as a local base image or a network.
    """
    more = shlex.split(os.environ.get("DISTLAUNCH_DOCKER_BUILD", ""))
    output_of("docker", "build", "-t", IMAGE, "-f", "docker/Dockerfile", *more, ".", timeout_s=BUILD_S)
    return IMAGE


@dataclass(frozen=True)
class Cluster:
    """A Compose project. `project` is the folder mounted as /project in its containers."""

    name: str
    files: Sequence[Path]
    project: Path
    env: Mapping[str, str]
    version: str

    def compose(self, *arguments: str, timeout_s: float = UP_S) -> str:
        named = [part for file in self.files for part in ("-f", str(file))]
        command = [*VERSIONS[self.version], "-p", self.name, *named, *arguments]
        return output_of(*command, env=self.env, timeout_s=timeout_s)

    def up(self, *services: str) -> None:
        """Starts the services, and waits until they are healthy."""
        self.compose("--profile", "four", "up", "-d", *services)
        wait_until(lambda: all(map(self._is_healthy, services)), "the nodes are healthy", UP_S)

    def _is_healthy(self, service: str) -> bool:
        return output_of("docker", "inspect", "-f", "{{.State.Health.Status}}", self.container(service)) == "healthy\n"

    def container(self, service: str) -> str:
        return self._find("ps", "-a", "-q", "--filter", f"label=com.docker.compose.service={service}").strip()

    def processes(self, service: str) -> list[str]:
        """The processes of a container, except sshd, which keeps dead connections, and health checks.

        A health check begins as the `init` of the container runtime, before it executes its program. At its end, it has
        no command line any more, and is recognised by its parent, the runtime, which is outside of the container.
        """
        lines = output_of("docker", "top", self.container(service), "-o", "pid,ppid,args").splitlines()[1:]
        found = [line.split(maxsplit=2) for line in lines]
        pids = {pid for pid, _, _ in found}
        return [
            f"{pid} {command}"
            for pid, parent, command in found
            if not re.search(r"sshd|10022|(runc|/proc/self/exe|/proc/self/fd/\d+) init", command)
            and (parent in pids or not NO_COMMAND_LINE.fullmatch(command))
        ]

    @contextlib.contextmanager
    def cable_pulled(self, service: str) -> Iterator[None]:
        """Cuts off the container for a while; unlike `network disconnect`, this keeps the container's address."""
        index = output_of("docker", "exec", self.container(service), "cat", "/sys/class/net/eth0/iflink").strip()
        [ours] = [link for _, link in socket.if_nameindex() if _index_of(link) == index]
        subprocess.run(["ip", "link", "set", ours, "down"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "set", ours, "up"], check=True)

    def write_spec(self, rest: str, workers: Sequence[int] = (1, 2)) -> str:
        """Writes a spec for distlaunch on this machine, with one worker on each of these nodes; returns its path."""
        nodes = "".join(
            f"  - {{host: worker-{number}, address: worker-{number}, ssh: {{port: {self.env[f'PORT_{number}']}}}}}\n"
            for number in workers
        )
        keys = self.env["KEYS"]
        path = self.project / "spec.yaml"
        path.write_text(
            f"nodes:\n{nodes}ssh: {{hostname: 127.0.0.1, user: trainer, identity_file: {keys}/id_ed25519, "
            f"known_hosts_file: {keys}/known_hosts}}\nworking_directory: /project\n{rest}"
        )
        return str(path)

    def start(self, folder: Path, rest: str, workers: Sequence[int] = (1, 2)) -> BackgroundRun:
        """`distlaunch up` on this machine."""

        def popen(argv: list[str], stderr: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr, stdin=subprocess.DEVNULL)

        return BackgroundRun(folder, "up", [self.write_spec(rest, workers)], popen)

    def down(self) -> None:
        self.compose("--profile", "four", "down", "--volumes", "--remove-orphans")
        assert self.left() == []

    def left(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        return [
            *self._find("ps", "-a", "-q").split(),
            *self._find("network", "ls", "-q").split(),
            *self._find("volume", "ls", "-q").split(),
        ]

    def _find(self, *arguments: str) -> str:
        return output_of("docker", *arguments, "--filter", f"label=com.docker.compose.project={self.name}")


def _index_of(link: str) -> str:
    return str(socket.if_nametoindex(link))


@contextlib.contextmanager
def running_cluster(
    project: Path, *more_files: Path, file: Path = COMPOSE_FILE, version: str = "", env: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A project with nothing started yet; removes it at the end, and asserts that nothing of it is left."""
    skip_without_docker()
    project.chmod(0o755)  # the containers run as another user
    ports = {f"PORT_{number}": str(port) for number, port in enumerate(_free_ports(4), 1)}
    keys = project.parent / f"{project.name}-keys"
    keys.mkdir()
    settings = {"PROJECT": str(project), "KEYS": str(keys), "DISTLAUNCH_IMAGE": build_image(), **ports, **(env or {})}
    name = f"distlaunch-{secrets.token_hex(4)}"
    cluster = Cluster(name, [file, *more_files], project, settings, version or compose_versions()[-1])
    try:
        yield cluster
    finally:
        cluster.down()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [made.getsockname()[1] for made in sockets]


def layers_of(image: str) -> Iterator[tuple[str, bytes]]:
    """Every small file of every layer of an image, even if a later layer deletes the file, with its content."""
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        with tarfile.open(fileobj=saving.stdout, mode="r|") as whole:
            for part in whole:
                if not part.name.endswith("layer.tar") and "blobs/" not in part.name:
                    continue
                stream = whole.extractfile(part)
                assert stream is not None
                yield from _small_files(stream)


def _small_files(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with contextlib.suppress(tarfile.ReadError):  # a blob other than a layer
        with tarfile.open(fileobj=stream, mode="r|*") as layer:
            for member in layer:
                content = layer.extractfile(member) if member.isfile() and member.size < (1 << 16) else None
                yield member.name, content.read() if content is not None else b""


def image_config(image: str) -> str:
    """An image's metadata: its environment, commands, history."""
    return output_of("docker", "inspect", image) + output_of("docker", "history", "--no-trunc", image)


@contextlib.contextmanager
def running_container(shared: Path) -> Iterator[str]:
    """A container without sshd or network, which sees this folder at the same path."""
    skip_without_docker()
    name = f"distlaunch-way-{secrets.token_hex(4)}"
    wait = "trap 'exit 0' TERM; while :; do sleep 1; done"
    options = ("-d", "--rm", "--network", "none", "--user", "root", "--entrypoint", "sh", "--name", name)
    output_of("docker", "run", *options, "-v", f"{shared}:{shared}", build_image(), "-c", wait)
    try:
        yield name
    finally:
        output_of("docker", "stop", name)
