"""`distlaunch up` on unusual real servers: it works, or reports an error with the reason in time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.harness.available import find_program
from tests.harness.hosts.sshd import Hosts, make_addresses, make_hosts, running_sshd, skip_without_openssh
from tests.harness.processes.commands import Distlaunch, Ran
from tests.harness.witness import assert_none_left, await_none_left, make_mark, marked

COVERS = (
    "launcher/transports",
    "launcher/verdict",
    "worker_entry/agent/tasks/task.py",
)

ECHO = "program: {command: [echo, here]}\n"
ODD = "gpu-odd"
SHELLS = ("sh", "bash", "tcsh", "csh", "zsh", "fish")
SOON_S = 120.0
"""No error may take as long as a start-up timeout of 600 s, even on a busy machine."""
IMPATIENT = "timeouts: {start_s: 2}\n"
NO_OTHER_CACHE = "mount -t tmpfs none /var/tmp"
"""A node without a usable home keeps files in /var/tmp; they must not stay on the machine that runs the tests."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a spec, not started yet. All processes that their daemons start carry `mark`."""

    hosts: Hosts
    mark: dict[str, str]
    distlaunch: Distlaunch
    stack: contextlib.ExitStack

    @property
    def folder(self) -> Path:
        return self.hosts.folder

    @property
    def home(self) -> Path:
        return self.hosts.home

    def start(
        self,
        *,
        options: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        prepare: Sequence[str] = (),
    ) -> None:
        """Starts one daemon for all addresses; the commands in `prepare` mount what no other process sees."""
        around = [*_own_mounts(), "\n".join([*prepare, 'exec "$@"']), "sh"] if prepare else []
        addresses = self.hosts.addresses.values()
        session = {**self.mark, **(env or {})}
        self.stack.enter_context(running_sshd(self.hosts, *addresses, options=options, env=session, around=around))

    def start_with_bashrc(self, text: str) -> None:
        """Starts the daemon for a user whose bash reads this text first."""
        (self.home / ".bashrc").write_text(f"echo > {self.folder}/bashrc-was-read\n{text}\n")
        self.start(prepare=[self.login_shell("/bin/bash")])

    @property
    def bashrc_was_read(self) -> bool:
        return (self.folder / "bashrc-was-read").exists()

    def login_shell(self, shell: str) -> str:
        """The command that gives this user another login shell, by a password file that only the daemon sees."""
        entries = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        mine = [[*entry[:6], shell] if entry[2] == str(os.getuid()) else entry for entry in entries]
        passwd = self.folder / "passwd"
        passwd.write_text("".join(":".join(entry) + "\n" for entry in mine))
        return f"mount --bind {passwd} /etc/passwd"

    def configure(self, lines: str) -> None:
        """Puts lines before all others of the user's ssh configuration."""
        config = self.folder / "config"
        config.write_text(f"Host *\n{lines}\n{config.read_text()}")

    def up(
        self,
        rest: str = ECHO,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        timeout: float = SOON_S,
    ) -> Ran:
        """Runs a worker on each of the nodes; `env` is added to distlaunch's environment."""
        spec = self.hosts.write_spec(rest, python=python)
        ran = self.distlaunch("up", spec, env={**self.hosts.env, **self.mark, **(env or {})}, timeout=timeout)
        assert "Traceback" not in ran.stderr.replace("│ Traceback", "")  # except in what a task printed
        return ran

    def works(self, rest: str = ECHO, *, python: str = sys.executable) -> Ran:
        """Runs as `up` does, and checks that every task printed `here` and nothing is left."""
        ran = self.up(rest, python=python)
        assert ran.status == 0, ran.stderr
        count = len(self.hosts.addresses)
        assert sorted(ran.stdout.splitlines()) == [f"worker:{index} │ here" for index in range(count)]
        assert f"0 processes left on {count} node" in ran.stderr
        assert_none_left(self.mark)
        return ran

    def refused(self, *, python: str = sys.executable) -> str:
        """Runs as `up` does, and checks that every node is named, nothing was started and nothing is left.

        Returns stderr from the error on.
        """
        ran = self.up(python=python)
        assert ran.status == 3, ran.stderr
        assert [name for name in self.hosts.addresses if name not in _error(ran)] == []
        assert [task["started"] for task in ran.report["attempts"][0]["tasks"]] == [None] * len(self.hosts.addresses)
        assert_none_left(self.mark)
        return _error(ran)


MakeNodes = Callable[[Mapping[str, str]], Nodes]


@pytest.fixture
def make_nodes(tmp_path: Path, distlaunch: Distlaunch) -> Iterator[MakeNodes]:
    """Makes nodes from their names and addresses; at the end, ends the nodes and all that runs on them."""
    skip_without_openssh()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    mark = make_mark()
    with contextlib.ExitStack() as stack:

        def make(addresses: Mapping[str, str]) -> Nodes:
            hosts = make_hosts(folder, addresses)
            hosts.trust()
            return Nodes(hosts, mark, distlaunch, stack)

        yield make
        for process in marked(mark):  # some are left if a test has failed, or if a .bashrc waits
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.fixture
def node(make_nodes: MakeNodes) -> Nodes:
    """A single node that is not started yet."""
    return make_nodes(make_addresses(names=[ODD]))


# --- what a server allows ---


@pytest.mark.parametrize("_time", ["once", "twice", "thrice"])
def test_eight_nodes_run_on_a_server_that_limits_concurrent_logins(
    make_nodes: MakeNodes, capfd: pytest.CaptureFixture[str], _time: str
) -> None:
    nodes = make_nodes(make_addresses(names=(f"gpu-{number}" for number in range(2, 10))))
    nodes.start(options={"MaxStartups": "2:50:4", "LogLevel": "VERBOSE"})
    capfd.readouterr()
    nodes.works()
    assert "past MaxStartups" in capfd.readouterr().err  # the server did reject some connections


def test_one_ssh_session_without_terminal_forwarding_and_sftp_is_enough(node: Nodes) -> None:
    node.start(options={"MaxSessions": 1, "PermitTTY": "no", "DisableForwarding": "yes"})
    env = {**os.environ, **node.hosts.env}
    sftp = subprocess.run(["ssh", "-s", ODD, "sftp"], env=env, capture_output=True, stdin=subprocess.DEVNULL, text=True)
    assert "subsystem request failed" in sftp.stderr
    node.works()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param({"ForceCommand": "echo maintenance"}, "maintenance", id="forces-a-command"),
        pytest.param({"MaxSessions": 0}, "runs no command", id="allows-no-session"),
        pytest.param(
            {"DenyUsers": pwd.getpwuid(os.getuid()).pw_name},
            "rejects the login; refused: .*/user_key",
            id="denies-the-user",
        ),
    ],
)
def test_a_server_that_denies_commands_or_logins_is_reported_with_the_reason(
    node: Nodes, options: Mapping[str, object], why: str
) -> None:
    node.start(options=options)
    said = node.refused()
    assert re.search(why, said)
    assert "processes left" not in said  # no agent ever ran there


def test_a_server_that_accepts_only_passwords_is_reported(node: Nodes) -> None:
    node.start(options={"PubkeyAuthentication": "no", "PasswordAuthentication": "yes"})
    assert "password" in node.refused()


@pytest.mark.parametrize("user", ["root", "no-such-user"])
def test_a_user_who_may_not_log_in_over_ssh_is_named(node: Nodes, user: str) -> None:
    node.configure(f"User {user}")
    node.start(options={"PermitRootLogin": "no"})
    assert f"{user}@{node.hosts.addresses[ODD]}:{node.hosts.port} rejects the login; refused: " in node.refused()


# --- login shells ---


def test_the_message_of_a_nologin_account_is_reported(node: Nodes) -> None:
    node.start(prepare=[node.login_shell("/usr/sbin/nologin")])
    assert "This account is currently not available" in node.refused()


def test_the_status_of_a_login_shell_that_ends_silently_is_reported(node: Nodes) -> None:
    node.start(prepare=[node.login_shell("/bin/false")])
    assert re.search(r"\bstatus 1\b", node.refused())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("head -c 1000000 /dev/zero | tr '\\0' x", id="a-megabyte"),
        pytest.param("echo hello >&2", id="to-stderr"),
        pytest.param("printf '\\377\\376\\036\\n\\303'", id="no-utf8"),
    ],
)
def test_output_of_a_bashrc_is_ignored(node: Nodes, text: str) -> None:
    node.start_with_bashrc(text)
    node.works()
    assert node.bashrc_was_read


def test_the_status_of_a_bashrc_that_exits_is_reported(node: Nodes) -> None:
    node.start_with_bashrc("exit 1")
    said = node.refused()
    assert node.bashrc_was_read
    assert re.search(r"\bstatus 1\b", said)


def test_a_bashrc_that_hangs_ends_the_run_in_time_and_starts_nothing_later(node: Nodes) -> None:
    node.start_with_bashrc(f"while [ ! -e {node.folder}/go-on ]; do sleep 0.1; done")
    ran = node.up(ECHO + IMPATIENT)
    assert node.bashrc_was_read
    assert ran.status == 3
    assert ODD in _error(ran)
    (node.folder / "go-on").touch()
    await_none_left(node.mark)


@pytest.mark.parametrize("shell", [*filter(None, (find_program(shell, "-c", "true") for shell in SHELLS))])
def test_every_installed_login_shell_works(node: Nodes, shell: str) -> None:
    node.start(prepare=[node.login_shell(shell)])
    node.works()


# --- Python ---


def test_a_node_without_python_on_its_path_is_reported_with_a_hint(node: Nodes) -> None:
    node.start(env={"PATH": "/nonexistent"})
    assert "cannot be used: no Python at python3; set `python:` for this node" in node.refused(python="python3")


def test_a_missing_python_of_a_node_is_named(node: Nodes) -> None:
    node.start()
    assert "no Python at /opt/none/bin/python" in node.refused(python="/opt/none/bin/python")


def test_python_38_on_a_node_is_reported_as_too_old(node: Nodes) -> None:
    node.start()
    assert "is Python 3.8; a node needs 3.9 or newer" in node.refused(python=_python((3, 8), node.folder))


def test_a_node_works_with_python_39(node: Nodes) -> None:
    node.start()
    node.works(python=_python((3, 9), node.folder))


# --- home folders ---


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("mount --bind {0} {0}; mount -o remount,bind,ro {0}", id="bind-mount"),
        pytest.param("mount -t tmpfs -o ro none {0}", id="file-system"),
    ],
)
def test_a_read_only_home_folder_is_reported_with_its_node(node: Nodes, how: str) -> None:
    node.start(prepare=[NO_OTHER_CACHE, how.format(node.home)])
    assert f"{node.home}/.local: Read-only file system" in node.refused()


def test_a_home_folder_on_a_full_disk_is_reported(node: Nodes) -> None:
    fill = f"head -c 1000000 /dev/zero > {node.home}/everything || :"
    node.start(prepare=[NO_OTHER_CACHE, f"mount -t tmpfs -o size=64k none {node.home}", fill])
    _check_full(node.up(), node)


def test_a_log_that_fills_the_disk_is_reported(node: Nodes) -> None:
    (node.folder.parent / "fill.py").write_text("import os\nwhile True: os.write(1, b'x' * 4095 + b'\\n')\n")
    # 4 MiB have room for worker_entry and the files of a task, but not for that log.
    node.start(prepare=[NO_OTHER_CACHE, f"mount -t tmpfs -o size=4m none {node.home}"])
    _check_full(node.up("program: {script: fill.py}\n"), node)


def test_a_home_folder_mounted_with_noexec_works(node: Nodes) -> None:
    node.start(prepare=[NO_OTHER_CACHE, f"mount -t tmpfs -o noexec none {node.home}"])
    probe = f"cp {shutil.which('true')} ~/probe && ! ~/probe 2> /dev/null && echo here"
    node.works(f"program: {{command: [sh, -c, '{probe}']}}\n")


# --- servers that do not speak SSH, or stop ---

TALK = {
    "closes-at-once": (b"", r"SSH|closed|hung up"),
    "hangs-up-after-its-version": (b"SSH-2.0-odd\r\n", r"SSH|closed|hung up"),
    "no-packets": (b"SSH-2.0-odd\r\n" + bytes(400), r"packet|SSH|closed|hung up"),
    "old-version": (b"SSH-1.5-odd\r\n", r"1\.5"),
    "web-server": (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", r"HTTP/1\.1 400 Bad Request"),
    "sends-us-away": (b"Not allowed at this time\r\n", r"Not allowed at this time"),
}
"""What servers send before they close the connection, and how the error reports it."""


def test_a_server_that_closes_the_connection_is_reported_with_its_message(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(make_addresses(names=TALK))
    for name, address in nodes.hosts.addresses.items():
        nodes.stack.enter_context(_talker(address, nodes.hosts.port, TALK[name][0], hang_up=True))
    said = nodes.refused()
    told = {
        name: re.search(f"node {name} cannot be used: {address}:{nodes.hosts.port}[: ] *(.*)", said)
        for name, address in nodes.hosts.addresses.items()
    }
    unclear = {
        name: match and match[1] for name, match in told.items() if not (match and re.search(TALK[name][1], match[1]))
    }
    assert unclear == {}


SILENCE = {
    "says-nothing": b"",
    "says-its-version-only": b"SSH-2.0-odd\r\n",
    "says-a-version-and-garbage": b"SSH-2.0-odd\r\n" + hashlib.sha256(b"").digest() * 100,
}
"""What servers send before they wait for ever."""


def test_a_server_that_becomes_silent_ends_the_run_in_time(make_nodes: MakeNodes) -> None:
    nodes = make_nodes(make_addresses(names=SILENCE))
    for name, address in nodes.hosts.addresses.items():
        nodes.stack.enter_context(_talker(address, nodes.hosts.port, SILENCE[name], hang_up=False))
    ran = nodes.up(ECHO + IMPATIENT)
    assert ran.status == 3
    assert [name for name in SILENCE if name not in _error(ran)] == []


# --- environment variables ---


def test_a_megabyte_of_unusual_environment_variables_arrives_unchanged(node: Nodes) -> None:
    odd = [
        "'",
        '"',
        "$(touch /nowhere) `x`",
        "two\nlines\n",
        "\r\n\t",
        " spaces ",
        "",
        "é ü 漢字 \U0001f600 \u2028",
        "\x01\x7f\\",
    ]
    written = {f"ODD_{number}": value for number, value in enumerate(odd)}
    named = {f"ODD_LONG_{number}": f"{number}'\n\"é$" * 14_000 for number in range(12)}
    assert sum(len(value.encode()) for value in named.values()) > 1_000_000
    (node.folder.parent / "show.py").write_text(
        "import hashlib, json, os\n"
        "values = {name: value for name, value in os.environb.items() if name.startswith(b'ODD_')}\n"
        "print(json.dumps({name.decode(): hashlib.sha256(value).hexdigest() for name, value in values.items()}))\n"
    )
    node.start()
    spec = {"program": {"script": "show.py"}, "env": written, "env_from": list(named)}
    ran = node.up(yaml.safe_dump(spec), env=named)
    assert ran.status == 0, ran.stderr
    expected = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in {**written, **named}.items()}
    assert json.loads(ran.log()) == expected
    assert_none_left(node.mark)


def _check_full(ran: Ran, node: Nodes) -> None:
    assert ran.status in (1, 3), ran.stderr
    assert ODD in _error(ran)
    assert "0 processes left on 1 node" in ran.stderr
    assert_none_left(node.mark)
    assert "No space left on device" in _error(ran)


def _error(ran: Ran) -> str:
    """The part of stderr from the error on."""
    _, error, rest = ran.stderr.partition("Error: ")
    assert error, ran.stderr
    return rest


def _own_mounts() -> list[str]:
    """The words before a shell script that run it in its own mount namespace."""
    me = [] if os.geteuid() == 0 else ["--map-current-user", "--keep-caps"]
    words = ["unshare", *me, "--mount"]
    if find_program(*words, "true") is None:
        pytest.skip("mounting is not permitted here")
    return [*words, "sh", "-ec"]


def _python(version: tuple[int, int], folder: Path) -> str:
    """An interpreter of that version; if there is none, a program that claims to be one."""
    name = f"python{version[0]}.{version[1]}"
    found = [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))]
    for path in [*found, name]:
        if (works := find_program(path, "-c", "pass")) is not None:
            return works
    code = f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0)\n"
    stand_in = folder / name
    stand_in.write_text(f'#!/bin/sh\nshift; exec {sys.executable} -c {shlex.quote(code)}"$1" "$2" "$3" "$4"\n')
    stand_in.chmod(0o755)
    return str(stand_in)


@contextlib.contextmanager
def _talker(address: str, port: int, says: bytes, *, hang_up: bool) -> Iterator[None]:
    """A server that sends the same bytes to every client and never reads."""
    callers: list[socket.socket] = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed at the end
            while True:
                caller, _ = server.accept()
                callers.append(caller)
                with contextlib.suppress(OSError):
                    caller.sendall(says)
                    if hang_up:
                        caller.shutdown(socket.SHUT_RDWR)

    with socket.create_server((address, port)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for caller in callers:
                caller.close()
