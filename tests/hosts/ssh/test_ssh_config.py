"""Reading a host's SSH configuration, from `ssh -G` or without OpenSSH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.transports.base import LinkError
from launcher.transports.ssh import config
from launcher.transports.ssh.config import load_target, parse_target
from tests.harness.witness import await_none_left, make_mark

COVERS = ("launcher/transports/ssh",)

Configure = Callable[[bytes], None]


def test_include_and_match_in_an_ssh_configuration_are_followed(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("host", ["gpu-a", "alice@gpu-a"])
@pytest.mark.parametrize("more", [b"", b"  HostKeyAlias lab\n  User bob\n"], ids=["plain", "alias"])
def test_ssh_configuration_tokens_have_the_same_values_as_for_openssh(
    configure: Configure, tmp_path: Path, host: str, more: bytes
) -> None:
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


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (b"  IdentityFile /caf\xe9\n", r"is not UTF-8: identityfile /caf\xe9"),
        (b"  Port none\n", "ssh does not accept its configuration: "),
        (b'  User "alice\n', "ssh does not accept its configuration: "),
    ],
    ids=["not-utf-8", "odd-port", "unclosed-quote"],
)
def test_an_invalid_ssh_configuration_is_reported(configure: Configure, config: bytes, told: str) -> None:
    configure(config)
    with pytest.raises(LinkError, match=re.escape(told)):
        load_target("gpu-a")


def test_an_ssh_configuration_that_hangs_is_reported_and_leaves_no_process(
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
