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
def test_a_line_counts_for_the_hosts_that_it_names(known_hosts: Path, field: str, name: str, means: bool) -> None:
    known_hosts.write_text(f"{field} {LINE}\n")
    assert load_known_keys(name, [known_hosts]).trusted == ((KEY,) if means else ())


def test_all_files_count_and_missing_ones_do_not_matter(known_hosts: Path, tmp_path: Path) -> None:
    known_hosts.write_text(f"gpu-a {LINE}\n")
    second = tmp_path / "second"
    second.write_text(f"# a comment\n\ngpu-a {OTHER_LINE} a comment\n")
    assert load_known_keys("gpu-a", [known_hosts, tmp_path / "none", second]).trusted == (KEY, OTHER)


def test_a_revoked_key_is_not_trusted(known_hosts: Path) -> None:
    known_hosts.write_text(f"@revoked * {LINE}\ngpu-a {OTHER_LINE}\n")
    known = load_known_keys("gpu-a", [known_hosts])
    assert (known.trusted, known.revoked) == ((OTHER,), (KEY,))


def test_an_authoritys_key_is_not_the_hosts(known_hosts: Path) -> None:
    known_hosts.write_text(f"@cert-authority *.lab {LINE}\n")
    known = load_known_keys("gpu-a.lab", [known_hosts])
    assert (known.trusted, known.has_authority) == ((), True)
    assert not load_known_keys("gpu-a.home", [known_hosts]).has_authority


@pytest.mark.parametrize(
    "line", ["gpu-a", "gpu-a ssh-ed25519", "gpu-a no-such-type AAAA", "@revoked", "\x00\xff", "gpu-a ecdsa"]
)
def test_a_line_that_is_none_is_passed_over(known_hosts: Path, line: str) -> None:
    known_hosts.write_text(f"{line}\ngpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (KEY,)


def test_a_file_that_has_changed_counts_as_it_is_now(known_hosts: Path) -> None:
    known_hosts.write_text(f"gpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (KEY,)
    known_hosts.write_text(f"gpu-a {OTHER_LINE}\ngpu-a {LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (OTHER, KEY)


@pytest.mark.parametrize("field", ["|1|", "|1|x|y|z", "|1|***|***", "|1|x"])
def test_a_broken_hash_means_nobody(known_hosts: Path, field: str) -> None:
    known_hosts.write_text(f"{field} {LINE}\ngpu-a {OTHER_LINE}\n")
    assert load_known_keys("gpu-a", [known_hosts]).trusted == (OTHER,)
