"""Reading a host's SSH configuration, from `ssh -G` or without OpenSSH."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.transports.base import LinkError
from launcher.transports.ssh.config import SshTarget, load_target, parse_target
from launcher.transports.ssh.limits import find_limit

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


def test_address_user_keys_and_known_hosts_come_from_the_ssh_configuration() -> None:
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
def test_a_host_is_looked_up_in_known_hosts_by_name_and_port(more: str, name: str) -> None:
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
def test_proxy_jumps_and_proxy_commands_become_one_proxy_command(more: str, command: str | None) -> None:
    assert parse(more).proxy_command == command


def test_fast_ssh_ciphers_are_preferred_and_none_is_added() -> None:
    slow = "chacha20-poly1305@openssh.com,aes128-ctr"
    assert parse(f"ciphers {slow},aes256-gcm@openssh.com\n").cipher_options() == [
        f"Ciphers=aes256-gcm@openssh.com,{slow}"
    ]
    assert parse(f"ciphers {slow}\n").cipher_options() == [f"Ciphers={slow}"]
    assert parse().cipher_options() == []


@pytest.mark.parametrize("port", ["0", "65536", "-1", "ssh", "²"])
def test_an_invalid_port_in_the_ssh_configuration_is_reported(port: str) -> None:
    with pytest.raises(LinkError, match=f"ssh's configuration of this host has Port {port}, which is not a port"):
        parse(f"port {port}\n")


def test_quotes_in_file_names_of_the_ssh_configuration_are_literal() -> None:
    """OpenSSH prints the names without quoting."""
    assert parse("userknownhostsfile /home/o'brien/known /k\"n\n").known_hosts[:2] == (
        Path("/home/o'brien/known"),
        Path('/k"n'),
    )


def test_known_hosts_files_of_none_mean_no_file() -> None:
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
def test_identityagent_selects_the_socket_of_the_ssh_agent(
    monkeypatch: pytest.MonkeyPatch, agent: str, socket: str | None
) -> None:
    monkeypatch.setenv("MY_AGENT", "/run/mine")
    monkeypatch.delenv("NO_AGENT", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse(f"identityagent {agent}\n").identity_agent == socket


def test_an_invalid_ssh_configuration_is_reported_without_openssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ssh" / "config"
    file.parent.mkdir()
    file.write_text("Host gpu-a\n  User alice\n")
    assert load_target("gpu-a").user == "alice"
    file.write_text("Host gpu-a\n  User\n")
    with pytest.raises(LinkError, match=f"^cannot read {file}: Unparsable line"):
        load_target("gpu-a")


@pytest.mark.parametrize(
    ("more", "public", "limit"),
    [
        ("pkcs11provider /usr/lib/card.so", "ssh-ed25519 AAAA", "its keys are on a smart card"),
        ("pkcs11provider none", "sk-ssh-ed25519@openssh.com AAAA", "the key id is on a security key"),
        ("pkcs11provider none", "ssh-ed25519 AAAA", ""),
    ],
)
def test_ssh_keys_that_paramiko_cannot_use_are_detected(tmp_path: Path, more: str, public: str, limit: str) -> None:
    (tmp_path / "id").write_text("private")
    (tmp_path / "id.pub").write_text(public)
    assert find_limit(parse(f"identityfile {tmp_path}/id\n{more}\n")) == limit
