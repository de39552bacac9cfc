"""Which host keys are accepted: each line of known_hosts and each option, compared with OpenSSH itself."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from paramiko.hostkeys import HostKeys

from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.connector import Opening
from launcher.transports.payload import make_payload
from launcher.transports.programs import ProgramConnector
from launcher.transports.ssh.config import load_target
from launcher.transports.ssh.connect import connect
from launcher.transports.ssh.connector import ParamikoConnector
from launcher.transports.targets import find_connector
from tests.harness.hosts.sshd import Hosts, running_hosts, skip_without_openssh

COVERS = ("launcher/transports/ssh", "launcher/transports/targets.py")

NODE = "gpu-a"


@dataclass(frozen=True)
class Keys:
    """Running hosts, whose configuration a test changes."""

    hosts: Hosts
    usual: str
    """The original configuration."""

    def read(self, name: str) -> str:
        """The type and the base64 of a key."""
        return " ".join((self.hosts.folder / f"{name}.pub").read_text().split()[:2])

    def write(self, known_hosts: str) -> None:
        """Writes known_hosts, with the host and its keys in place of their names in braces."""
        name = self.hosts.known_name(NODE)
        values = {
            "name": name,
            "address": self.hosts.addresses[NODE],
            "port": str(self.hosts.port),
            "hashed": HostKeys.hash_host(name),
            "key": self.read("host_key"),
            "other": self.read("other_key"),
            "tabs": self.read("host_key").replace(" ", "\t"),
        }
        self.hosts.known_hosts.write_bytes(known_hosts.format(**values).encode())

    def configure(self, options: str) -> None:
        """Puts options in front of the configuration, where they take precedence."""
        text = options.replace("{folder}", str(self.hosts.folder))
        (self.hosts.folder / "config").write_text(f"Host *\n  {text}\n{self.usual}" if options else self.usual)

    def openssh_accepts(self) -> bool:
        command = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", NODE, "true"]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **self.hosts.env})
        refused = b"Host key verification failed" in done.stderr or b"revoked" in done.stderr
        assert refused == (done.returncode != 0), done.stderr.decode()
        return not refused


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    with running_hosts(tmp_path_factory.mktemp("ssh")) as started:
        yield started


@pytest.fixture
def keys(running: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    for name, value in running.env.items():
        monkeypatch.setenv(name, value)
    config = running.folder / "config"
    keys = Keys(running, config.read_text())
    yield keys
    config.write_text(keys.usual)


def accepts(node: str = NODE) -> bool:
    """Whether our own client accepts the host's key."""
    try:
        connect(load_target(node), cancelled=threading.Event(), within_s=20, attempts=3).close()
    except LinkError as error:
        if "host key" not in str(error):
            raise
        return False
    return True


LINES = {
    "known": "{name} {key}",
    "changed": "{name} {other}",
    "unknown": "",
    "both, the true one last": "{name} {other}\n{name} {key}",
    "without its port": "{address} {key}",
    "without its port, and revoked there": "{address} {key}\n@revoked {address} {key}",
    "without its port, and changed with it": "{address} {key}\n{name} {other}",
    "without its port, and revoked with it": "{address} {key}\n@revoked {name} {key}",
    "without its port, and changed there": "{address} {other}",
    "with spaces": "{name}   {key}",
    "hashed": "{hashed} {key}",
    "with a comment": "{name} {key} a comment",
    "with tabs": "{name}\t{key}",
    "indented": "  \t{name} {key}",
    "with a carriage return": "{name} {key} x\r",
    "a comment": "# {name} {key}",
    "an indented comment": "  # {name} {key}",
    "a pattern": "[127.*]:{port} {key}",
    "a negated pattern": "[127.*]:{port},!{name} {key}",
    "after a form feed": "gpu-z {other} x\x0c{name} {key}",
    "after a line separator": "gpu-z {other} x\u2028{name} {key}",
    "a field with a no-break space": "{name}\u00a0{key}",
    "revoked": "@revoked {name} {key}",
    "known and revoked": "{name} {key}\n@revoked {name} {key}",
    "revoked everywhere": "{name} {key}\n@revoked * {key}",
    "revoked, with a tab": "{name} {key}\n@revoked\t*\t{key}",
    "revoked, with tabs only": "{name} {key}\n@revoked\t*\t{tabs}",
    "revoked, indented": "{name} {key}\n  @revoked * {key}",
    "revoked, indented by a tab": "{name} {key}\n\t@revoked * {key}",
    "revoked, with spaces": "{name} {key}\n@revoked   *   {key}",
    "revoked, hashed": "{name} {key}\n@revoked {hashed} {key}",
    "revoked for others": "{name} {key}\n@revoked gpu-z {key}",
    "revoked, another key": "{name} {key}\n@revoked * {other}",
    "revoked, with another marker": "{name} {key}\n@revoked @cert-authority * {key}",
    "an unknown marker": "{name} {key}\n@withdrawn * {key}",
    "an unknown marker, and nothing else": "@withdrawn {name} {key}",
    "a marker in capitals": "{name} {key}\n@REVOKED * {key}",
    "an authority": "@cert-authority {name} {key}",
    "a broken line before it": "{name} nothing\n{name} {key}",
    "not UTF-8": "\udcff gpu-z\n{name} {key}".encode("utf-8", "surrogateescape").decode("latin-1"),
}
STRICTER = {"revoked, with a tab"}
"""Lines that OpenSSH ignores because a space follows later, although their meaning is clear."""


@pytest.mark.parametrize("case", LINES)
def test_a_line_of_known_hosts_has_the_same_meaning_as_for_openssh(keys: Keys, case: str) -> None:
    keys.write(LINES[case])
    assert accepts() == (keys.openssh_accepts() and case not in STRICTER)


ALIASES = {
    "known": "{alias} {key}",
    "known in capitals": "GPU-ALIAS {key}",
    "revoked in capitals": "{alias} {key}\n@revoked GPU-ALIAS {key}",
    "revoked by a pattern in capitals": "{alias} {key}\n@revoked GPU-* {key}",
    "changed in capitals": "GPU-ALIAS {other}",
}


@pytest.mark.parametrize("alias", ["gpu-alias", "Gpu-Alias"])
@pytest.mark.parametrize("case", ALIASES)
def test_names_in_known_hosts_match_case_insensitively_as_for_openssh(keys: Keys, case: str, alias: str) -> None:
    keys.configure(f"HostKeyAlias {alias}")
    keys.write(ALIASES[case].replace("{alias}", alias))
    assert accepts() == keys.openssh_accepts()


@pytest.mark.parametrize(
    ("option", "decides"),
    [
        ("RevokedHostKeys {folder}/host_key.pub", True),
        ("RevokedHostKeys {folder}/other_key.pub", True),
        ("RevokedHostKeys none", False),
        ("KnownHostsCommand /bin/echo @revoked * nothing", True),
    ],
)
def test_nodes_with_a_host_key_option_are_reached_only_by_openssh(keys: Keys, option: str, decides: bool) -> None:
    keys.configure(option)
    keys.write("{name} {key}")
    assert accepts() != decides
    connector = find_connector(make_spec(), NodeSpec(host=NODE))
    assert isinstance(connector, ProgramConnector) == decides
    if isinstance(connector, ProgramConnector):
        assert f"because {option.split()[0]} of ssh decides on its host key" in connector.note
        assert can_open(connector) == keys.openssh_accepts()


def make_spec(**fields: object) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": [{"host": NODE}], "program": {"script": "x.py"}, **fields})


def can_open(connector: ProgramConnector | ParamikoConnector) -> bool:
    """Whether the connector opens; a node that is reached reports whether it has worker_entry."""
    try:
        stream = connector.open(make_payload("clean"), "python3", Opening(within_s=20, attempts=3))
        try:
            return b"worker_entry" in stream.read(1000, 30.0)
        finally:
            stream.abandon()
    except (LinkError, LinkBroken) as error:
        if "host key" not in str(error).lower():
            raise
        return False


WEAKER = (
    "StrictHostKeyChecking no",
    "StrictHostKeyChecking off",
    "StrictHostKeyChecking accept-new",
    "NoHostAuthenticationForLocalhost yes",
)
KNOWN = {"changed": "{name} {other}", "revoked": "{name} {key}\n@revoked * {key}", "new": ""}


@pytest.mark.parametrize("option", WEAKER)
@pytest.mark.parametrize("case", KNOWN)
@pytest.mark.parametrize("connection", ["openssh", "paramiko"])
def test_a_weaker_host_key_check_in_the_ssh_configuration_is_ignored(
    keys: Keys, option: str, case: str, connection: str
) -> None:
    keys.configure(option)
    keys.write(KNOWN[case])
    found = find_connector(make_spec(connection=connection), NodeSpec(host=NODE))
    assert isinstance(found, (ProgramConnector, ParamikoConnector))
    assert not can_open(found)
    keys.write("{name} {key}")
    assert can_open(found)


def test_a_new_host_key_is_accepted_if_the_spec_allows_it(keys: Keys) -> None:
    for connection in ("openssh", "paramiko"):
        keys.write("{name} {other}")
        found = find_connector(make_spec(connection=connection, host_keys="accept-new"), NodeSpec(host=NODE))
        assert isinstance(found, (ProgramConnector, ParamikoConnector))
        assert not can_open(found)
        keys.write("")
        assert can_open(found)
        assert keys.read("host_key") in keys.hosts.known_hosts.read_text()


def refusal() -> str:
    """The error of our own client."""
    with pytest.raises(LinkError) as raised:
        connect(load_target(NODE), cancelled=threading.Event(), within_s=20, attempts=1)
    return str(raised.value)


def follow(error: str) -> None:
    """Runs the command at the end of an error."""
    subprocess.run(["sh", "-c", error.rpartition("run: ")[2]], check=True, capture_output=True)


@pytest.mark.parametrize("option", ["", "HostKeyAlias gpu-alias", "UserKnownHostsFile {folder}/none/yet/known_hosts"])
def test_the_command_that_an_error_names_makes_an_unknown_host_key_known(keys: Keys, option: str) -> None:
    keys.configure(option)
    keys.write("")
    follow(refusal())
    assert accepts()
    assert keys.openssh_accepts()


def test_the_commands_that_errors_name_replace_a_changed_host_key(keys: Keys) -> None:
    keys.write("{name} {other}")
    changed = refusal()
    assert "has changed, or the connection is intercepted" in changed
    follow(changed)
    follow(refusal())
    assert accepts()


@pytest.fixture
def ssh_agent(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """An ssh-agent of this test."""
    path = str(tmp_path / "agent")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as agent:
        yield {"SSH_AUTH_SOCK": path}
        agent.terminate()


@pytest.mark.parametrize("connection", ["openssh", "paramiko"])
def test_a_node_gets_no_access_to_the_controller_machine(
    keys: Keys, connection: str, ssh_agent: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", ssh_agent["SSH_AUTH_SOCK"])
    monkeypatch.setenv("DISPLAY", "127.0.0.1:77")
    ran = tmp_path / "ran"
    keys.configure(
        f"ForwardAgent yes\n  ForwardX11 yes\n  RemoteForward 127.0.0.1:{keys.hosts.port + 7} 127.0.0.1:1\n"
        f"  PermitLocalCommand yes\n  LocalCommand touch {ran}"
    )
    keys.write("{name} {key}")
    plain = subprocess.run(["ssh", NODE, "echo $SSH_AUTH_SOCK"], capture_output=True, text=True, check=True)
    assert plain.stdout.strip()  # the configuration has an effect
    assert ran.exists()
    ran.unlink()
    found = find_connector(make_spec(connection=connection), NodeSpec(host=NODE))
    seen = keys.hosts.folder / "seen"
    python = keys.hosts.folder / "shows"
    python.write_text(f'#!/bin/sh\necho "agent=$SSH_AUTH_SOCK display=$DISPLAY" > {seen}\n')
    python.chmod(0o755)
    stream = found.open(make_payload("clean"), str(python), Opening(within_s=20, attempts=3))
    try:
        while stream.read(1000, 30.0):
            pass
    finally:
        stream.abandon()
    assert seen.read_text() == "agent= display=\n"
    assert not ran.exists()


def test_kerberos_credentials_are_not_delegated_to_nodes(keys: Keys) -> None:
    keys.configure("GSSAPIDelegateCredentials yes")
    connector = find_connector(make_spec(connection="openssh"), NodeSpec(host=NODE))
    assert isinstance(connector, ProgramConnector)
    assert "GSSAPIDelegateCredentials=no" in connector.words


@pytest.mark.parametrize("words", ["%n %h %p %r", "%% %%h"])
def test_tokens_of_a_proxycommand_have_the_same_values_as_for_openssh(keys: Keys, words: str) -> None:
    proxy, said = keys.hosts.folder / "proxy", keys.hosts.folder / "said"
    # It echoes its input: a proxy that ends at once is killed before it has done anything.
    proxy.write_text(f'#!/bin/sh\necho "$*" >> {said}\necho SSH-2.0-x\nexec cat\n')
    proxy.chmod(0o755)
    keys.configure(f"ProxyCommand {proxy} '{words}'")
    subprocess.run(["ssh", NODE, "true"], capture_output=True, check=False)
    with pytest.raises(LinkError):
        connect(load_target(NODE), cancelled=threading.Event(), within_s=20, attempts=1)
    lines = said.read_text().splitlines()
    said.unlink()
    assert len(lines) == 2
    assert lines[0] == lines[1]


@pytest.mark.parametrize("token", ["%C", "%n", "%u", "%L", "%l", "%i", "%k", "%d", "%h", "%p", "%r", "%%", "${HOME}"])
def test_tokens_of_identity_files_have_the_same_values_as_for_openssh(keys: Keys, token: str) -> None:
    keys.configure(f"IdentityFile none\n  ControlPath /x/{token}-y")
    asked = subprocess.run(["ssh", "-G", NODE], capture_output=True, text=True, check=True).stdout
    theirs = next(line.split()[1] for line in asked.splitlines() if line.startswith("controlpath "))
    keys.configure(f"IdentityFile /x/{token}-y")
    assert Path(theirs) in load_target(NODE).identity_files


@pytest.mark.parametrize("text", ["%Q", "%"])
def test_an_unknown_token_of_the_ssh_configuration_is_refused(keys: Keys, text: str) -> None:
    keys.configure(f"ProxyCommand nc {text}x %h")
    with pytest.raises(LinkError, match="has no meaning here"):
        load_target(NODE)
