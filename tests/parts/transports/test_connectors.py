"""What every connection to a node has to do: the same tests over each of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import psutil
import pytest

from launcher.transports.base import LinkBroken
from launcher.transports.connector import Opening
from launcher.transports.payload import make_payload
from launcher.transports.programs import LINE, SAID_LINES, ProgramConnector, expand
from launcher.transports.ssh.connector import ChannelStream
from tests.harness.hosts.containers import running_container
from tests.harness.hosts.kubernetes import find_cluster
from tests.harness.hosts.slurm import running_slurm
from tests.harness.hosts.sshd import make_hosts, running_sshd, skip_without_openssh
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, Ran, distlaunch_command
from tests.harness.witness import assert_none_left, await_none_left, make_mark, wait_until

COVERS = ("launcher/transports",)

HOSTILE = ["a b", "'", '"', "$HOME `id` \\", "line\nbreak", "ünïcode ⚙", "-x", "*", ";", "&&", "\t", "#", "~", "%h"]


@dataclass(frozen=True)
class Place:
    """A node. `connection`: YAML. `client` finds the program that connects, among our descendants."""

    host: str
    connection: str
    env: Mapping[str, str]
    client: str
    python: str = sys.executable

    def write_spec(self, folder: Path, settings: str) -> str:
        path = folder / "spec.yaml"
        path.write_text(
            f"connection: {self.connection}\n"
            f"nodes: [{{host: {self.host}, address: 127.0.0.1, python: {self.python}}}]\n{settings}"
        )
        return str(path)


CONNECTION = f"{sys.executable}, {PROGRAMS / 'connection.py'}"
PROGRAM_CONNECTIONS = {
    "a line for a shell": f"{{command: [{CONNECTION}, sh, -c, '{{command}}']}}",
    "words": f"{{command: [{CONNECTION}]}}",
}


@pytest.fixture(
    params=[
        *PROGRAM_CONNECTIONS,
        pytest.param("paramiko", marks=pytest.mark.ssh),
        pytest.param("openssh", marks=pytest.mark.ssh),
        pytest.param("ssh as a command", marks=pytest.mark.ssh),
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("kubernetes", marks=pytest.mark.kubernetes),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param in PROGRAM_CONNECTIONS:
        yield Place("node", PROGRAM_CONNECTIONS[request.param], {}, "connection.py")
        return
    if request.param == "docker":
        with running_container(tmp_path) as name:
            yield Place(name, "docker", {}, "docker exec", python="python3")
        return
    if request.param == "slurm":
        with running_slurm(tmp_path_factory.mktemp("slurm"), nodes=1) as cluster:
            cluster.run("salloc", "--no-shell", "-N1")
            job = cluster.run("squeue", "-h", "-o", "%i").strip()
            yield Place("node1", "slurm", {**cluster.env, "SLURM_JOB_ID": job}, "srun")
        return
    if request.param == "kubernetes":
        kubernetes = find_cluster()
        with kubernetes.running_pod(tmp_path) as name:
            yield Place(name, "kubernetes", kubernetes.env, "kubectl")
        return
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    hosts = make_hosts(folder)
    with running_sshd(hosts, *hosts.addresses.values()):
        hosts.trust()
        connection = (
            request.param if request.param != "ssh as a command" else "{command: [ssh, -T, '{host}', '{command}']}"
        )
        yield Place("gpu-a", connection, hosts.env, "ssh")


def up(distlaunch: Distlaunch, place: Place, folder: Path, settings: str, **env: str) -> Ran:
    return distlaunch("up", place.write_spec(folder, settings), env={**place.env, **env})


def as_yaml(script: str, *arguments: str) -> str:
    return f"program: {{command: {json.dumps(['sh', '-c', script, *arguments])}}}\n"


def test_a_connection_passes_hostile_arguments_and_a_large_environment_unchanged(
    distlaunch: Distlaunch, place: Place, tmp_path: Path
) -> None:
    large = {f"LARGE_{index}": f"{index}x'\"\n é" * 15_000 for index in range(9)}
    show = 'printf "%s" ' + " ".join(f'"${name}"' for name in large)
    script = f'for word; do printf "%s\\0" "$word"; done; {show} | cksum; head -c 2000000 /dev/urandom'
    settings = f"env_from: [{', '.join(large)}]\n{as_yaml(script, 'sh', *HOSTILE)}"
    ran = up(distlaunch, place, tmp_path, settings, **large)
    assert ran.status == 0, ran.stderr
    assert "0 processes left" in ran.stderr
    log, whole = ran.log("worker-0"), "".join(large.values()).encode()
    assert len(whole) > 1_000_000
    words = "".join(f"{word}\0" for word in HOSTILE).encode()
    sums = subprocess.run(["cksum"], input=whole, capture_output=True, check=True).stdout
    assert log.startswith(words + sums)
    assert len(log) == len(words) + len(sums) + 2_000_000


def test_a_broken_connection_is_reopened_without_losing_output(place: Place, tmp_path: Path) -> None:
    mark = make_mark()
    script = "i=0; while [ ! -e end ]; do i=$((i+1)); echo line $i; sleep 0.01; done; echo $i >last"
    spec = place.write_spec(tmp_path, f"working_directory: {tmp_path}\n{as_yaml(script)}")
    command = distlaunch_command("up", "--run-dir", str(tmp_path / "run"), "-e", next(iter(mark)), spec)
    env = {**os.environ, **place.env, **mark}
    log = tmp_path / "run" / "attempt-1" / "worker-0.log"
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for number in (1, 2):
            wait_until(lambda: log.exists() and b"line" in log.read_bytes(), "it runs")
            break_way(place, process.pid)
            grown = len(log.read_bytes())
            wait_until(lambda: len(log.read_bytes()) > grown + 1000, f"the run continues after {number}")  # noqa: B023
        (tmp_path / "end").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("nothing was lost") == 2
    last = int((tmp_path / "last").read_text())
    assert log.read_text() == "".join(f"line {number}\n" for number in range(1, last + 1))
    assert_none_left(mark)


def break_way(place: Place, controller: int) -> None:
    """Ends the connection: the program that connects, or the server's end of it."""
    if place.connection == "paramiko":
        sessions = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "sshd"]
        mine = psutil.Process().children(recursive=True)
        for session in sessions:
            if session in mine and session.parent() in mine:
                session.kill()
        return
    children = psutil.Process(controller).children()
    [client] = [child for child in children if place.client in " ".join(child.cmdline())]
    if place.connection == "slurm":  # both processes of srun: if only the first dies, the second cancels the step
        os.killpg(client.pid, signal.SIGKILL)
    else:
        client.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_over_any_connection(place: Place, tmp_path: Path) -> None:
    mark = make_mark()
    program = as_yaml("echo begun; setsid sleep 600 & exec sleep 600")
    spec = place.write_spec(tmp_path, f"working_directory: {tmp_path}\n{program}")
    command = distlaunch_command("up", "--run-dir", str(tmp_path / "run"), "-e", next(iter(mark)), spec)
    log = tmp_path / "run" / "attempt-1" / "worker-0.log"
    env = {**os.environ, **place.env, **mark}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: log.exists() and b"begun" in log.read_bytes(), "it runs")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "0 processes left" in said
    await_none_left(mark)


# --- programs that do not connect ---


@pytest.mark.parametrize(
    ("connection", "said"),
    [
        ("{command: [no-such-program]}", "node: no-such-program, the program of its connection, is not on PATH"),
        ("{command: ['false']}", "false ended with status 1"),
        ("{command: [sh, -c, 'echo no such machine >&2; exit 255']}", "sh ended with status 255: no such machine"),
        ("{command: [sh, -c, 'echo Welcome; exit 3']}", "Welcome"),
        ("{command: [sh, -c, 'kill -9 $$']}", "sh was ended by signal 9"),
    ],
)
def test_a_failing_connection_program_is_reported_with_its_reason(
    distlaunch: Distlaunch, tmp_path: Path, connection: str, said: str
) -> None:
    ran = distlaunch("up", Place("node", connection, {}, "").write_spec(tmp_path, as_yaml("true")))
    assert ran.status in (2, 3)
    assert "node" in ran.stderr
    assert said in ran.stderr, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "around",
    [
        "echo Welcome to this machine; {command}",
        "printf 'no newline'; {command}",
        "echo a word on stderr >&2; {command}",
        "{command} 2>&1",
        "cd /; umask 0; {command}",
    ],
)
def test_other_output_before_the_agent_does_not_break_a_connection(
    distlaunch: Distlaunch, tmp_path: Path, around: str
) -> None:
    connection = f"{{command: [sh, -c, {json.dumps(around)}]}}"
    ran = distlaunch("up", Place("node", connection, {}, "").write_spec(tmp_path, as_yaml("echo begun")))
    assert ran.status == 0, ran.stderr
    assert ran.log("worker-0") == b"begun\n"


def test_a_connection_through_a_terminal_is_reported(distlaunch: Distlaunch, tmp_path: Path) -> None:
    program = tmp_path / "terminal"
    program.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import pty, sys
            sys.exit(pty.spawn(["/bin/sh", "-c", sys.argv[1]]))
            """)
    )
    program.chmod(0o755)
    connection = f"{{command: [{program}, '{{command}}']}}"
    ran = distlaunch("up", Place("node", connection, {}, "").write_spec(tmp_path, as_yaml("echo begun")))
    assert ran.status == 3
    assert "a terminal" in ran.stderr


def test_placeholders_of_a_connection_command_are_expanded() -> None:
    payload = make_payload("node")
    assert expand(["ssh", "{host}", "{command}"], "a", payload) == ["ssh", "a", payload.command]
    assert expand(["gcloud", "--command={command}", "x-{host}"], "a", payload)[1:] == [
        f"--command={payload.command}",
        "x-a",
    ]
    assert expand(["docker", "exec", "-i", "{host}"], "a", payload) == ["docker", "exec", "-i", "a", *payload.words]
    show = f"set -- {payload.command.removeprefix('exec ')}; printf '%s' \"$3\""
    done = subprocess.run(["sh", "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout == payload.words[2]


def test_endless_stderr_of_a_connection_program_uses_little_memory() -> None:
    """A node can make its `ssh` print this: 200 MB without a line break, and then 200,000 lines."""
    script = "head -c 200000000 /dev/zero | tr '\\0' x >&2; yes | head -200000 >&2; echo the last >&2; exit 1"
    connector = ProgramConnector(("sh", "-c", script), "gpu-a")
    before = psutil.Process().memory_info().rss
    stream = connector.open(make_payload("clean"), "python3", Opening())
    with pytest.raises(LinkBroken, match="the last"):
        stream.read(10, 60.0)
    assert len(stream._said) <= SAID_LINES
    assert max(map(len, stream._said)) <= LINE
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_the_last_stderr_line_of_an_ended_connection_program_is_shown() -> None:
    def hear(_: str) -> bool:
        time.sleep(0.2)  # as a busy machine, which takes its time for many lines
        return True

    connector = ProgramConnector(("sh", "-c", "seq 5 >&2; echo the last >&2; exit 1"), "gpu-a", heard=hear)
    with pytest.raises(LinkBroken, match="the last"):
        connector.open(make_payload("clean"), "python3", Opening()).read(10, 60.0)


def test_every_read_error_of_paramiko_is_a_broken_connection() -> None:
    """Reading also adjusts the window of the channel, which fails with other exceptions than reading does."""
    for error in (EOFError(), OSError("Socket is closed"), paramiko.SSHException("closed")):

        def receive(_: int, error: Exception = error) -> bytes:
            raise error

        channel: Any = SimpleNamespace(settimeout=lambda _: None, recv=receive)
        connection: Any = None
        with pytest.raises(LinkBroken, match="the connection broke"):
            ChannelStream(connection, channel, b"").read(1, 1.0)
