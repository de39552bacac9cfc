"""Reading a host's SSH configuration, from `ssh -G` or without OpenSSH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.transports.base import LinkError
from launcher.transports.ssh import config
from launcher.transports.ssh.config import SshTarget, load_target, parse_target
from launcher.transports.ssh.limits import find_limit
from launcher.transports.targets import find_way
from tests.witness import await_none_left, make_mark

COVERS = ("launcher/transports/ssh",)

Configure = Callable[[bytes], None]

PLAIN = """\
user alice
hostname 10.0.0.12
port 22
identitiesonly no
identityfile ~/.ssh/id_ed25519
identityfile ~/.ssh/id_%h
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile ~/.ssh/known_hosts ~/.ssh/known_hosts2
proxycommand none
"""


def parse(more: str = "", host: str = "gpu-b") -> SshTarget:
    return parse_target(host, more + PLAIN)  # the first value of a key counts, as it does for OpenSSH


def test_address_user_keys_and_known_hosts_are_those_of_ssh() -> None:
    target = parse()
    assert (target.host, target.hostname, target.port, target.user) == ("gpu-b", "10.0.0.12", 22, "alice")
    home = Path.home() / ".ssh"
    assert target.identity_files == (home / "id_ed25519", home / "id_10.0.0.12")
    assert target.known_hosts[:2] == (home / "known_hosts", home / "known_hosts2")
    assert target.known_hosts[2:] == (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
    assert not target.identities_only
    assert target.proxy_command is None


@pytest.mark.parametrize(
    ("more", "name"),
    [("", "10.0.0.12"), ("port 2222\n", "[10.0.0.12]:2222"), ("port 2222\nhostkeyalias lab\n", "lab")],
)
def test_known_hosts_has_the_host_under_its_name_and_port(more: str, name: str) -> None:
    assert parse(more).key_name == name


@pytest.mark.parametrize(
    ("more", "command"),
    [
        ("proxycommand nc -X 5 %h %p\n", "nc -X 5 10.0.0.12 22"),
        ("proxyjump bastion\n", "ssh -o BatchMode=yes -W '[10.0.0.12]:22' -- bastion"),
        ("proxyjump bob@bastion:2200\n", "ssh -o BatchMode=yes -p 2200 -W '[10.0.0.12]:22' -- bob@bastion"),
        ("proxyjump first,second\n", "ssh -o BatchMode=yes -J first -W '[10.0.0.12]:22' -- second"),
        ("proxyjump none\n", None),
    ],
)
def test_proxies_become_a_proxy_command(more: str, command: str | None) -> None:
    assert parse(more).proxy_command == command


def test_fast_ciphers_come_first_and_none_is_added() -> None:
    slow = "chacha20-poly1305@openssh.com,aes128-ctr"
    assert parse(f"ciphers {slow},aes256-gcm@openssh.com\n").cipher_options() == [
        f"Ciphers=aes256-gcm@openssh.com,{slow}"
    ]
    assert parse(f"ciphers {slow}\n").cipher_options() == [f"Ciphers={slow}"]
    assert parse().cipher_options() == []


@pytest.mark.parametrize("port", ["0", "65536", "-1", "ssh", "²"])
def test_an_invalid_port_is_reported(port: str) -> None:
    with pytest.raises(LinkError, match=f"ssh's configuration of this host has Port {port}, which is not a port"):
        parse(f"port {port}\n")


def test_quotes_in_names_of_files_are_part_of_the_names() -> None:
    """OpenSSH prints the names without quoting."""
    assert parse("userknownhostsfile /home/o'brien/known /k\"n\n").known_hosts[:2] == (
        Path("/home/o'brien/known"),
        Path('/k"n'),
    )


def test_known_hosts_none_means_no_file() -> None:
    assert parse("userknownhostsfile none\nglobalknownhostsfile none\n").known_hosts == ()


@pytest.mark.parametrize(
    ("agent", "socket"),
    [
        ("SSH_AUTH_SOCK", None),
        ("none", ""),
        ("$MY_AGENT", "/run/mine"),
        ("${MY_AGENT}", "/run/mine"),
        ("$NO_AGENT", ""),
        ("~/%r.sock", "/home/someone/alice.sock"),
    ],
)
def test_the_ssh_agent_is_the_one_that_ssh_uses(
    monkeypatch: pytest.MonkeyPatch, agent: str, socket: str | None
) -> None:
    monkeypatch.setenv("MY_AGENT", "/run/mine")
    monkeypatch.delenv("NO_AGENT", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse(f"identityagent {agent}\n").identity_agent == socket


def test_without_openssh_an_invalid_configuration_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ssh" / "config"
    file.parent.mkdir()
    file.write_text("Host gpu-a\n  User alice\n")
    assert load_target("gpu-a").user == "alice"
    file.write_text("Host gpu-a\n  User\n")
    with pytest.raises(LinkError, match=f"^cannot read {file}: Unparsable line"):
        load_target("gpu-a")


def test_an_ssh_that_does_not_start_is_reported_with_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").write_text("#!/nowhere/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    spec = ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}], "program": {"script": "train.py"}})
    with pytest.raises(UsageError, match=r"^gpu-a: `ssh -G` cannot be started: No such file or directory$"):
        find_way(spec, spec.nodes[0])


@pytest.mark.parametrize(
    ("more", "public", "limit"),
    [
        ("pkcs11provider /usr/lib/card.so", "ssh-ed25519 AAAA", "its keys are on a smart card"),
        ("pkcs11provider none", "sk-ssh-ed25519@openssh.com AAAA", "the key id is on a security key"),
        ("pkcs11provider none", "ssh-ed25519 AAAA", ""),
    ],
)
def test_keys_that_paramiko_cannot_use_are_found(tmp_path: Path, more: str, public: str, limit: str) -> None:
    (tmp_path / "id").write_text("private")
    (tmp_path / "id.pub").write_text(public)
    assert find_limit(parse(f"identityfile {tmp_path}/id\n{more}\n")) == limit


@pytest.mark.ssh
def test_include_and_match_of_a_real_configuration_are_followed(tmp_path: Path) -> None:
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("OpenSSH is not installed")
    (tmp_path / "more").write_text("Host gpu-*\n  HostName %h.lab\n  Port 2200\n")
    (tmp_path / "config").write_text(
        f'Include {tmp_path / "more"}\nMatch host "*.lab"\n  User carol\n  ProxyJump bastion\n'
    )
    (tmp_path / "config").chmod(0o600)
    asked = subprocess.run(
        [ssh, "-F", str(tmp_path / "config"), "-G", "gpu-c"], capture_output=True, text=True, check=True
    )
    target = parse_target("gpu-c", asked.stdout)
    assert (target.hostname, target.port, target.user) == ("gpu-c.lab", 2200, "carol")
    assert target.proxy_command == "ssh -o BatchMode=yes -W '[gpu-c.lab]:2200' -- bastion"


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Lets `ssh` read another configuration, which the returned function writes."""
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("OpenSSH is not installed")
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {tmp_path}/config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")

    def write(config: bytes) -> None:
        (tmp_path / "config").write_bytes(b"Host gpu-*\n" + config)
        (tmp_path / "config").chmod(0o600)

    return write


@pytest.mark.ssh
@pytest.mark.parametrize("host", ["gpu-a", "alice@gpu-a"])
@pytest.mark.parametrize("more", [b"", b"  HostKeyAlias lab\n  User bob\n"], ids=["plain", "alias"])
def test_tokens_mean_what_they_mean_to_openssh(configure: Configure, tmp_path: Path, host: str, more: bytes) -> None:
    """The proxy writes the expanded command; `-v` shows the expanded names of the files with keys."""
    said = tmp_path / "said"
    configure(
        b"  HostName 10.0.0.9\n  Port 2299\n  IdentityAgent none\n"
        + more
        + b"  IdentityFile /keys/%%%n%u%h%p%r%C%l%L%i\n"
        b'  ProxyCommand sh -c \'echo "$@" >' + bytes(said) + b"' - %% %n %h %p %r %k\n"
    )
    done = subprocess.run(
        ["ssh", "-v", "-T", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    key = re.search(r"identity file (\S+) type", done.stderr)
    assert key is not None, done.stderr
    expected = said.read_text()
    said.unlink()
    target = load_target(host)
    assert [str(path) for path in target.identity_files] == [key[1]]
    assert target.proxy_command is not None
    subprocess.run(["sh", "-c", target.proxy_command], check=True)
    assert said.read_text() == expected
    assert expected.split()[:2] == ["%", "gpu-a"]


@pytest.mark.ssh
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (b"  IdentityFile /caf\xe9\n", r"is not UTF-8: identityfile /caf\xe9"),
        (b"  Port none\n", "ssh does not accept its configuration: "),
        (b'  User "alice\n', "ssh does not accept its configuration: "),
    ],
    ids=["not-utf-8", "odd-port", "unclosed-quote"],
)
def test_an_invalid_configuration_is_reported(configure: Configure, config: bytes, told: str) -> None:
    configure(config)
    with pytest.raises(LinkError, match=re.escape(told)):
        load_target("gpu-a")


@pytest.mark.ssh
def test_a_configuration_that_hangs_is_reported_and_leaves_no_process(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = make_mark()
    for name, value in mark.items():
        monkeypatch.setenv(name, value)
    configure(b'Match exec "sleep 600; true"\n  User alice\n')
    monkeypatch.setattr(config, "ANSWER_S", 1.0)
    with pytest.raises(LinkError, match=r"`ssh -G gpu-a` does not answer within 1 s; a `Match exec` .* may hang"):
        load_target("gpu-a")
    await_none_left(mark)
