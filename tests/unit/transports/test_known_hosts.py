"""Which keys of a host known_hosts files allow."""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest
from paramiko.hostkeys import HostKeys

from launcher.transports.ssh.known_hosts import load_known_keys

KEY = paramiko.ECDSAKey.generate()
OTHER = paramiko.ECDSAKey.generate()
LINE = f"{KEY.get_name()} {KEY.get_base64()}"
OTHER_LINE = f"{OTHER.get_name()} {OTHER.get_base64()}"


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


HASHED = HostKeys.hash_host("gpu-a", "|1|c2FsdCBvZiAyMCBieXRlcyEhISE=|")
"""With a fixed salt, because the hash is part of test names."""


@pytest.mark.parametrize(
    ("field", "name", "means"),
    [
        ("gpu-a", "gpu-a", True),
        ("gpu-a", "gpu-ab", False),
        ("gpu-b,gpu-a,10.0.0.1", "10.0.0.1", True),
        ("*.lab", "gpu-a.lab", True),
        ("gpu-?", "gpu-a", True),
        ("*.lab,!gpu-b.lab", "gpu-b.lab", False),
        ("*.lab,!gpu-b.lab", "gpu-a.lab", True),
        ("[gpu-a]:2222", "[gpu-a]:2222", True),
        ("gpu-a", "[gpu-a]:2222", False),
        ("[gpu-a]:2222", "gpu-a", False),
        ("[10.0.0.*]:2222", "[10.0.0.7]:2222", True),
        (HASHED, "gpu-a", True),
        (HASHED, "gpu-b", False),
    ],
)
def test_a_known_hosts_line_applies_only_to_matching_hosts(
    known_hosts: Path, field: str, name: str, means: bool
) -> None:
    known_hosts.write_text(f"{field} {LINE}\n")
    assert load_known_keys(name, [known_hosts]).trusted == ((KEY,) if means else ())


def test_all_known_hosts_files_are_read_and_missing_ones_ignored(known_hosts: Path, tmp_path: Path) -> None:
    known_hosts.write_text(f"gpu-a {LINE}\n")
    second = tmp_path / "second"
    second.write_text(f"# a comment\n\ngpu-a {OTHER_LINE} a comment\n")
    assert load_known_keys("gpu-a", [known_hosts, tmp_path / "none", second]).trusted == (KEY, OTHER)


def test_a_revoked_host_key_is_not_trusted(known_hosts: Path) -> None:
    known_hosts.write_text(f"@revoked * {LINE}\ngpu-a {OTHER_LINE}\n")
    known = load_known_keys("gpu-a", [known_hosts])
    assert (known.trusted, known.revoked) == ((OTHER,), (KEY,))


def test_a_certificate_authority_key_is_not_trusted_as_a_host_key(known_hosts: Path) -> None:
    known_hosts.write_text(f"@cert-authority *.lab {LINE}\n")
    known = load_known_keys("gpu-a.lab", [known_hosts])
    assert (known.trusted, known.has_authority) == ((), True)
    assert not load_known_keys("gpu-a.home", [known_hosts]).has_authority


@pytest.mark.parametrize(
    "line", ["gpu-a", "gpu-a ssh-ed25519", "gpu-a no-such-type AAAA", "@revoked", "\x00\xff", "gpu-a ecdsa"]
)
def test_an_invalid_known_hosts_line_is_ignored(known_hosts: Path, line: str) -> None:
    known_hosts.write_text(f"{line}\ngpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (KEY,)


def test_a_changed_known_hosts_file_is_read_again(known_hosts: Path) -> None:
    known_hosts.write_text(f"gpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (KEY,)
    known_hosts.write_text(f"gpu-a {OTHER_LINE}\ngpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (OTHER, KEY)


@pytest.mark.parametrize("field", ["|1|", "|1|x|y|z", "|1|***|***", "|1|x"])
def test_an_invalid_hashed_host_name_matches_no_host(known_hosts: Path, field: str) -> None:
    known_hosts.write_text(f"{field} {LINE}\ngpu-a {OTHER_LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (OTHER,)
