"""What `ssh -G` says of a host, as values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.transports.ssh_config import SshTarget, parse_target

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


def test_the_host_is_reached_as_ssh_would() -> None:
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
def test_proxies_become_a_command_to_go_through(more: str, command: str | None) -> None:
    assert parse(more).proxy_command == command


def test_known_hosts_none_means_no_file() -> None:
    assert parse("userknownhostsfile none\nglobalknownhostsfile none\n").known_hosts == ()


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
