"""The first hour with two machines: from an empty home to a run, along the commands that errors name.

A person sits at gpu-c with an empty home, and has an account with a password on gpu-a and gpu-b. They type what the
messages tell them to type, and nothing else. What only a person can do is played here: to answer a prompt, to walk to
another machine, to be its administrator.
"""

from __future__ import annotations

import contextlib
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

from tests.harness.available import find_program
from tests.harness.hosts.namespaces import Host, Network, Run, needs_namespaces, running_network, sshd_words
from tests.harness.places import ROOT
from tests.harness.witness import wait_until

COVERS = (
    "launcher/transports",
    "launcher/gang/checks",
    "launcher/report",
    "launcher/verdict/judge.py",
    "launcher/controller/actions.py",
    "launcher/spec/writing.py",
    "launcher/cli/specs.py",
    "launcher/commands/doctor.py",
    "worker_entry/program",
    "worker_entry/protocol/advice.py",
    "worker_entry/agent/checks",
)

NODES = ("gpu-a", "gpu-b")
DESK = "gpu-c"
"""Where the person sits."""
PASSWORD = "correct horse"
PYTHON = "/usr/bin/python3"
"""The nodes' own Python."""
SUITABLE = f"""\
import ensurepip, importlib.util, sys, venv
sys.exit(sys.version_info[:2] != {sys.version_info[:2]} or importlib.util.find_spec("tensorflow") is not None)
"""
ANSWERS = f"""\
#!/bin/sh
case $1 in
  *yes/no*) echo yes;;
  *password*) echo '{PASSWORD}';;
  *) echo;;  # no passphrase
esac
"""
COMMAND = re.compile(
    r"(?:(?:on ([\w, -]+), )?run: |no key to try; make one with )(.+?)(?=; |, then | \[[\w-]+\]$|$)", re.MULTILINE
)
"""A command in a message, and the nodes on which to run it; by default, here."""
SETTING = re.compile(r"--(?:set|python) '?[\w\[\].]*=?'?[\w./~:-]+'?")
"""An option in a message."""
TRAIN = """\
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
print(strategy.num_replicas_in_sync, "replicas")
"""

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(
        find_program(PYTHON, "-c", SUITABLE) is None,
        reason=f"{PYTHON} is not this version of Python, cannot make virtual environments, or has TensorFlow",
    ),
]


def commands_of(said: str) -> list[tuple[str, str]]:
    """The commands that messages name, each with the machine on which to run it."""
    found = [(node, command) for nodes, command in COMMAND.findall(said) for node in (nodes or DESK).split(", ")]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Person:
    """Types commands in the folder `project` of the home at the desk. `options` are those that messages have named."""

    network: Network
    home: str
    typed: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    def types(self, command: str, at: str = DESK) -> Run:
        """Types a command; answers all prompts."""
        self.typed.append(command)
        tools = self.network.folder / "tools"
        env = {
            "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin" if at == DESK else "/usr/bin:/bin",
            "SSH_ASKPASS": f"{tools}/answers",  # plays the person at a prompt
            "SSH_ASKPASS_REQUIRE": "force",
            "PIP_NO_INDEX": "1",  # plays the package index
            "PIP_FIND_LINKS": str(self.network.folder / "packages"),
        }
        user = self.network.user
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"]
        words = [*become, "env", "-C", f"{self.home}/project" if at == DESK else self.home]
        words += [*(f"{name}={value}" for name, value in env.items()), "sh", "-c", command]
        return subprocess.run(
            [*self.network.hosts[at].enter, *words],
            input="\n",  # accepts the file that ssh-keygen proposes
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def tries(self, verb: str) -> str:
        """Types `distlaunch VERB` for the spec, with all options so far; returns what it says."""
        done = self.types(" ".join(["distlaunch", verb, *self.options, "cluster.yaml"]))
        return done.stdout + done.stderr

    def succeeds(self, verb: str) -> str:
        """The same, where nothing may be left to do."""
        said = self.tries(verb)
        assert {"check": "cluster: ok\n", "up": "\nSucceeded"}[verb] in said, said
        assert "Error" not in said
        return said

    def tries_all(self) -> str:
        """Types `check`, and `up` and `doctor`, which have to name the same commands; returns what `check` says."""
        said = self.tries("check")
        named = {*commands_of(said)}
        assert named, said
        started = {*commands_of(self.tries("up"))}  # it has a hint for the first error only
        assert started, said
        assert started <= named
        if not self.options:  # which doctor has no use for
            examined = self.types(f"distlaunch doctor -H {','.join(NODES)}").stdout
            assert {*commands_of(examined)} >= named  # it has more to say about nodes that work
        return said

    def follows(self, said: str) -> list[str]:
        """Does what a message says: runs its commands, each once, and takes up its options; returns the commands."""
        found = commands_of(said)
        for node, command in found:
            if command.startswith("sudo "):  # plays the node's administrator
                self.typed.append(command)
                self.network.hosts[node].run(shlex.split(command)[1:])
            else:
                done = self.types(command, node)
                assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        options = dict.fromkeys(SETTING.findall(said))
        self.options.extend(option for option in options if option not in self.options)
        assert found or options, f"it names no next command: {said}"
        return [command for _, command in found]

    def compares_fingerprints(self, said: str) -> None:
        """Walks to each node whose host key a message shows, and compares, before following the message."""
        shown = re.findall(r"of (gpu-\w) is unknown \(\S+ (\S+)\); .*?\(`(.+?)` there\)", said)
        assert len(shown) == said.count("is unknown")
        for node, fingerprint, command in shown:
            assert fingerprint in self.types(command, node).stdout


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two machines, and the person's. The nodes accept passwords, and the person's key once it is in their home."""
    with (
        running_network(tmp_path_factory.mktemp("hour"), count=3, user="alice") as network,
        contextlib.ExitStack() as stack,
    ):
        subprocess.run(["chpasswd"], input=f"{network.user}:{PASSWORD}", text=True, check=True)
        tools = network.folder / "tools"
        for path, text in {
            tools / "distlaunch": f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m launcher "$@"\n',
            tools / "answers": ANSWERS,
        }.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (network.folder / "packages").mkdir()
        home = pwd.getpwnam(network.user).pw_dir
        for host in network.hosts.values():
            host.run(["mount", "--bind", str(host.home), home])
            if host.name in NODES:
                # The nodes do not have the interpreter that runs distlaunch.
                host.run(["mount", "-t", "tmpfs", "none", f"{sys.prefix}/bin"])
                host.run(["mount", "-t", "tmpfs", "none", "/etc/ssh"])
                host.run(["cp", f"{host.folder}/host_key.pub", "/etc/ssh/ssh_host_ed25519_key.pub"])
                stack.enter_context(_front_door(host))
        yield network


@contextlib.contextmanager
def _front_door(host: Host) -> Iterator[None]:
    """A usual sshd, beside the one of the tests: on the usual port, with passwords."""
    options = [
        *(f"ListenAddress={address}" for address in (host.address, host.address6)),
        f"HostKey={host.folder}/host_key",
        *("PidFile=none", "StrictModes=no", "UsePAM=no", "UseDNS=no"),
    ]
    log = host.folder / "front_door.log"
    command = [*host.enter, *sshd_words(options)]
    with log.open("wb") as errors, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors) as daemon:
        try:
            wait_until(lambda: log.read_text().count("Server listening on") == 2, "sshd listens")
            yield
        finally:
            daemon.terminate()


@pytest.fixture
def person(network: Network) -> Person:
    """A person whose home is empty on all machines, except for the program at the desk."""
    for host in network.hosts.values():
        host.run(["find", str(host.home), "-mindepth", "1", "-delete"])
    person = Person(network, pwd.getpwnam(network.user).pw_dir)
    desk = network.hosts[DESK].home / "project"
    desk.mkdir()
    (desk / "train.py").write_text(TRAIN)
    network.hosts[DESK].run(["chown", "-R", network.user, str(desk)])
    return person


@pytest.fixture
def known(person: Person) -> Person:
    """A person who can log in on the nodes, and has a spec whose program needs no file there."""
    network, ssh = person.network, f"{person.home}/.ssh"
    make = f"mkdir -m 700 {ssh} && touch {ssh}/known_hosts && ssh-keygen -q -t ed25519 -N '' -f {ssh}/id_ed25519"
    assert person.types(make).returncode == 0
    public = (network.hosts[DESK].home / ".ssh" / "id_ed25519.pub").read_text()
    trusted = network.hosts[DESK].home / ".ssh" / "known_hosts"
    for node in NODES:
        host = network.hosts[node]
        with trusted.open("a") as stream:
            stream.write(f"{node},{host.address} {(host.folder / 'host_key.pub').read_text()}")
        assert person.types("mkdir -p -m 700 .ssh project", node).returncode == 0
        (host.home / ".ssh" / "authorized_keys").write_text(public)
    begin(person, "-- true")
    person.typed.clear()
    return person


def begin(person: Person, program: str) -> str:
    """Writes the spec; returns what `init` says."""
    (person.network.hosts[DESK].home / "project" / "cluster.yaml").unlink(missing_ok=True)
    done = person.types(f"distlaunch init -H {','.join(NODES)} {program}")
    assert done.returncode == 0, done.stderr
    return done.stderr


def publish(network: Network, package: str, version: str, files: dict[str, str]) -> None:
    """Adds a package to the index that pip sees."""
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(network.folder / "packages" / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {
            **files,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }.items():
            wheel.writestr(name, text)


@pytest.fixture
def index(network: Network) -> Iterator[Network]:
    """A network whose package index is empty afterwards."""
    yield network
    for path in (network.folder / "packages").iterdir():
        path.unlink()


# --- the whole way ---


@pytest.mark.tensorflow
@pytest.mark.smoke
def test_from_an_empty_home_to_a_run_every_command_is_named_by_the_message_before_it(
    person: Person, index: Network, record_property: Callable[[str, object], None]
) -> None:
    # The real TensorFlow, without the minutes that it takes to load.
    [packages] = [path for path in map(Path, sys.path) if (path / "tensorflow" / "__init__.py").exists()]
    publish(index, "tensorflow", metadata.version("tensorflow"), {"real_tensorflow.pth": f"{packages}\n"})
    began = time.monotonic()

    assert "`distlaunch check cluster.yaml` checks it" in begin(person, "train.py")
    rounds: list[list[str]] = []
    while commands_of(said := person.tries("check")) or "cluster: ok\n" not in said:
        assert len(rounds) < 10, said
        person.compares_fingerprints(said)
        rounds.append(person.follows(said))
    heading = (index.hosts[DESK].home / "project" / "cluster.yaml").read_text()
    assert "#   distlaunch up cluster.yaml" in heading
    assert "worker:1 │ 2 replicas" in person.succeeds("up")

    trust, let_in, *prepare = rounds
    assert [re.findall("&& (.*) >>", command) for command in trust] == [[f"ssh-keyscan {node}"] for node in NODES]
    assert let_in == ["ssh-keygen", *(f"ssh-copy-id {index.user}@{node}" for node in NODES)]
    assert [*chain(*prepare)] == [f"{PYTHON} -m venv ~/tf && ~/tf/bin/pip install tensorflow"] * 2
    assert sorted(person.options) == ["--python '~/tf/bin/python'", "--set sync.to='~/project'"]
    seconds = time.monotonic() - began
    record_property("commands", len(person.typed))
    record_property("seconds", round(seconds, 1))
    print(f"{len(person.typed)} commands, {seconds:.1f} s:", *person.typed, sep="\n  ")


# --- host keys and keys ---


CONNECTIONS = pytest.mark.parametrize("options", [[], ["--set connection=openssh"]], ids=["paramiko", "openssh"])


@CONNECTIONS
def test_an_unknown_host_key_is_accepted_by_the_command_that_the_error_names(known: Person, options: list[str]) -> None:
    known.options.extend(options)
    (known.network.hosts[DESK].home / ".ssh" / "known_hosts").unlink()
    commands = known.follows(known.tries_all())
    assert [command.split()[-3 if "keyscan" in command else -2] for command in commands] == [*NODES]
    known.succeeds("up")


def test_a_changed_host_key_is_replaced_by_the_commands_that_the_errors_name(known: Person) -> None:
    trusted = known.network.hosts[DESK].home / ".ssh" / "known_hosts"
    other, own = ((known.network.hosts[node].folder / "host_key.pub").read_text() for node in NODES)
    trusted.write_text(f"gpu-a {other}gpu-b {other}")
    said = known.tries_all()
    assert "the host key of gpu-b has changed, or the connection is intercepted" in said
    assert known.follows(said) == ["ssh-keygen -R 'gpu-b'"]
    said = known.tries_all()
    known.compares_fingerprints(said)
    known.follows(said)
    assert own.split()[1] in trusted.read_text()
    known.succeeds("up")


@CONNECTIONS
def test_a_key_that_nodes_refuse_is_let_in_by_the_command_that_the_error_names(
    known: Person, options: list[str]
) -> None:
    known.options.extend(options)
    for node in NODES:
        (known.network.hosts[node].home / ".ssh" / "authorized_keys").unlink()
    commands = known.follows(known.tries_all())
    assert [command.split()[0] for command in commands] == ["ssh-copy-id"] * 2
    known.succeeds("up")


# --- Python and packages ---


OLD = """\
#!/bin/sh
shift
code=$1
shift
exec REAL -c "import sys; sys.version_info = (3, 8, 1)
$code" "$@"
"""
"""Runs a Python as if it were 3.8."""


@contextlib.contextmanager
def python_of(host: Host, file: Path) -> Iterator[None]:
    """Puts a file in the place of a node's Python."""
    place = Path(PYTHON).resolve()
    host.run(["mount", "--bind", str(file), str(place)])
    try:
        yield
    finally:
        host.run(["umount", str(place)])


@pytest.mark.parametrize("old", [False, True], ids=["none", "too-old"])
def test_a_node_without_a_suitable_python_is_reported_with_the_field_and_the_package(known: Person, old: bool) -> None:
    host = known.network.hosts["gpu-b"]
    real, file = host.folder / "python", host.folder / "python3.8"
    shutil.copy(Path(PYTHON).resolve(), real)
    file.write_text(OLD.replace("REAL", str(real)))
    file.chmod(0o755)
    with python_of(host, file if old else Path("/dev/null")):
        said = known.tries("check")
        reason = f"{real} is Python 3.8; a node needs 3.9 or newer" if old else "no Python at python3"
        advice = "set `python:` for this node, or install Python 3.9 or newer there, as with: sudo apt install python3"
        assert f"Error: node gpu-b cannot be used: {reason}; {advice} [" in said
        assert "node gpu-a" not in said
        assert f"node gpu-b cannot be used: {reason}; {advice} [" in known.tries("up")
    known.succeeds("up")  # the administrator has installed it


def test_the_demo_on_nodes_without_tensorflow_names_the_command_that_installs_it(known: Person, index: Network) -> None:
    publish(index, "tensorflow", "2.21.0", {"tensorflow/__init__.py": ""})
    begin(known, "")
    said = known.tries_all()
    assert f"Error: worker:1 on gpu-b: TensorFlow is not installed for {PYTHON} [no-tensorflow]" in said
    assert known.follows(said) == [f"{PYTHON} -m venv ~/tf && ~/tf/bin/pip install tensorflow"] * 2
    assert "2.21.0" in known.succeeds("check")


def test_other_versions_on_a_node_are_reported_with_the_command_that_installs_the_same(
    known: Person, index: Network
) -> None:
    for package, versions in {"tensorflow": ("2.20.0", "2.21.0"), "keras": ("3.14.0", "3.15.1")}.items():
        for version in versions:
            publish(index, package, version, {f"{package}/__init__.py": ""})
    for node, packages in zip(NODES, ("tensorflow keras", "tensorflow==2.20.0 keras==3.14.0"), strict=True):
        assert known.types(f"{PYTHON} -m venv tf && tf/bin/pip install {packages}", node).returncode == 0
    known.options.append("--python '~/tf/bin/python'")
    said = known.succeeds("check")
    assert "Warning: TensorFlow differs: 2.21.0 on gpu-a; 2.20.0 on gpu-b [tensorflow-differs]" in said
    assert "Warning: Keras differs: 3.15.1 on gpu-a; 3.14.0 on gpu-b [keras-differs]" in said
    started = known.succeeds("up")
    assert commands_of(started) == commands_of(said)
    python = f"{known.home}/tf/bin/python"
    assert known.follows(said) == [
        f"{python} -m pip install tensorflow==2.21.0",
        f"{python} -m pip install keras==3.15.1",
    ]
    assert "differs" not in known.succeeds("check")


# --- firewalls and addresses ---


@contextlib.contextmanager
def firewall(host: Host, *words: str) -> Iterator[None]:
    """A rule of the host against connections to tasks, over both families; afterwards, the host has no rule at all."""
    try:
        for tool in ("iptables", "ip6tables"):
            refuse = [word.replace("icmp-host", "icmp6-adm" if tool == "ip6tables" else "icmp-host") for word in words]
            host.run([tool, "-w", "-A", "INPUT", "-p", "tcp", "--dport", "20000:20999", *refuse])
        yield
    finally:
        for tool in ("iptables", "ip6tables"):
            host.run([tool, "-w", "-F", "INPUT"])


@pytest.mark.parametrize(
    ("rule", "reason", "hint"),
    [
        ("DROP", "no answer", "a firewall may drop packets: open ports 20000-20999 between the nodes"),
        ("REJECT --reject-with tcp-reset", "connection refused", "a firewall may reject connections: open ports 20000"),
        ("REJECT --reject-with icmp-host-prohibited", "no route", "a firewall may reject connections, as firewalld"),
    ],
    ids=["drop", "reset", "prohibited"],
)
def test_a_firewall_between_workers_is_opened_by_the_command_that_the_error_names(
    known: Person, rule: str, reason: str, hint: str
) -> None:
    a, b = (known.network.hosts[node] for node in NODES)
    known.options.extend([f"--set 'nodes[0].address={a.address}'", f"--set 'nodes[1].address={b.address}'"])
    with firewall(b, "!", "-i", "lo", "-j", *rule.split()):
        said = known.tries_all()
        assert f"Error: gpu-a cannot reach worker:1 on gpu-b at {b.address}:20000: {reason} [cannot-reach]" in said
        assert hint in said
        assert known.follows(said) == [
            f"sudo iptables -I INPUT -p tcp -s {a.address} --dport 20000:20999 -j ACCEPT",
        ]
        known.succeeds("up")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.9", "no route"),
        ("10.77.0.99", "no route"),
        ("10.77.0.11", "something else answers there"),
        ("no-such-host.invalid", "the name does not resolve there"),
        ("itself", "there the name resolves to 127.0.1.1, gpu-a itself"),
    ],
    ids=["of-no-network", "of-nobody", "of-another-node", "unknown-name", "loopback"],
)
def test_a_wrong_address_is_corrected_by_the_option_that_the_error_names(
    known: Person, address: str, reason: str
) -> None:
    a, b = (known.network.hosts[node] for node in NODES)
    known.options.append(f"--set 'nodes[1].address={address}'")
    with contextlib.ExitStack() as stack:
        if address == "itself":  # Debian writes such a line for the machine's own name, and people copy the file
            own = known.network.folder / "hosts-of-gpu-a"
            own.write_text(f"{(known.network.folder / 'hosts').read_text()}127.0.1.1 itself\n")
            a.run(["mount", "--bind", str(own), "/etc/hosts"])
            stack.callback(a.run, ["umount", "/etc/hosts"])
        said = known.tries("check")
        assert re.search(rf"Error: gpu-a cannot reach worker:1 on gpu-b at {address}:20000.*{reason}", said), said
        assert f"gpu-b itself has {b.address}, {b.address6}: --set 'nodes[1].address={b.address}'" in said
        started = known.tries("up")
        assert f"--set 'nodes[1].address={b.address}'" in started, started
        known.options.clear()
        known.follows(said)
        assert known.options == [f"--set 'nodes[1].address={b.address}'"]
        known.succeeds("up")


def test_an_address_of_a_network_that_only_one_node_has_is_replaced_by_one_that_the_error_names(known: Person) -> None:
    b = known.network.hosts["gpu-b"]
    b.run(["ip", "link", "add", "storage", "up", "type", "veth", "peer", "name", "switch"])
    try:
        b.run(["ip", "address", "add", "10.88.0.12/24", "dev", "storage"])
        known.options.append("--set 'nodes[1].address=10.88.0.12'")
        for said in (known.tries("check"), known.tries("up")):
            assert "gpu-a cannot reach worker:1 on gpu-b at 10.88.0.12:20000: no route" in said
            assert f"; or give gpu-b another `address:` of its own ({b.address}, {b.address6})" in said
        known.options[:] = [f"--set 'nodes[1].address={b.address}'"]
        known.succeeds("up")
    finally:
        b.run(["ip", "link", "delete", "storage"])


def test_a_host_name_that_ssh_does_not_know_is_given_an_address_by_the_field_that_the_error_names(
    known: Person,
) -> None:
    known.types("distlaunch init --force -H gpu-a,gpu-x -- true")
    for options in ([], ["--set connection=openssh"]):
        known.options.extend(options)
        for said in (known.tries("check"), known.tries("up")):
            assert "node gpu-x cannot be used: " in said
            assert "; add it to ~/.ssh/config, or give its address with ssh.hostname" in said
    known.options.append(f"--set 'nodes[1].ssh.hostname={known.network.hosts['gpu-b'].address}'")
    known.succeeds("up")


def test_an_sshd_that_does_not_listen_is_reported_with_what_to_start_or_to_set(known: Person) -> None:
    known.options.append("--set 'nodes[1].ssh.port=2222'")
    advice = "start sshd there, or give its port with ssh.port; if the address is wrong, give another with ssh.hostname"
    for said in (known.tries("check"), known.tries("up")):
        assert f"node gpu-b cannot be used: connection refused: gpu-b:2222; {advice}" in said
    known.options[:] = ["--set 'nodes[1].ssh.port=22'"]
    known.succeeds("up")
