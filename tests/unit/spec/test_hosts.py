"""Hosts as named by `-H`, host files and commands: the meaning of each form, and the forms that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.spec.command_line import make_host_spec, read_hosts
from launcher.spec.hosts import SLOTS_LIMIT, Host, HostError, parse_hosts, parse_lines
from launcher.spec.nodes import NodeSpec


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu-a", [Host("gpu-a")]),
        ("gpu-a:2,gpu-b:3", [Host("gpu-a", 2), Host("gpu-b", 3)]),
        ("alice@gpu-a:4", [Host("alice@gpu-a", 4)]),
        ("10.0.0.7, 10.0.0.8", [Host("10.0.0.7"), Host("10.0.0.8")]),
        ("fd00::5", [Host("fd00::5")]),
        ("alice@fd00::5", [Host("alice@fd00::5")]),
        ("[fd00::5]:2", [Host("[fd00::5]", 2)]),
        ("ssh://gpu-a", [Host("gpu-a")]),
        ("ssh://alice@gpu-a:2222", [Host("alice@gpu-a", port=2222)]),
        ("ssh://[fd00::5]:2222:4/", [Host("[fd00::5]", 4, 2222)]),
        ("localhost:2", [Host("local", 2)]),
        ("ssh://localhost:2222", [Host("localhost", port=2222)]),
        ("me@localhost", [Host("me@localhost")]),
        ("gpu-a,gpu-b,gpu-a:2", [Host("gpu-a", 3), Host("gpu-b")]),
    ],
)
def test_every_form_of_a_host_is_parsed(text: str, hosts: list[Host]) -> None:
    assert parse_hosts([text]) == hosts


def test_the_hosts_option_may_be_given_several_times() -> None:
    assert parse_hosts(["gpu-a:2", "gpu-b,gpu-a"]) == [Host("gpu-a", 3), Host("gpu-b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a host, or `HOST:SLOTS` like `gpu-a:2`, got ''"),
        ("gpu-a,,gpu-b", "got ''"),
        ("gpu-a:two", "got 'gpu-a:two'"),
        ("gpu-a:", "got 'gpu-a:'"),
        (":2", "got ':2'"),
        ("gpu-a:2:2", "got 'gpu-a:2:2'"),
        ("gpu-a:-1", "got 'gpu-a:-1'"),
        ("http://gpu-a", "got 'http://gpu-a'"),
        ("gpu-a:0", "gpu-a has no slots; give it at least one, or remove it"),
        ("gpu-a:2222", "2222 slots on gpu-a are more than 1024; write the port of sshd as ssh://gpu-a:2222"),
    ],
)
def test_an_invalid_host_is_rejected_with_a_correction(text: str, message: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_hosts([text])
    assert str(caught.value).endswith(message)


OPEN_MPI = "# nodes\n\ngpu-a slots=2\ngpu-b slots = 4 max_slots=8  # the new one\ngpu-c\n"
DEEPSPEED = "gpu-a slots=4\ngpu-b slots=4\n"
MPICH = "gpu-a:2\nalice@gpu-b:4\n"
PBS = "gpu-a\ngpu-a\ngpu-b\n"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (OPEN_MPI, [Host("gpu-a", 2), Host("gpu-b", 4), Host("gpu-c")]),
        (DEEPSPEED, [Host("gpu-a", 4), Host("gpu-b", 4)]),
        (MPICH, [Host("gpu-a", 2), Host("alice@gpu-b", 4)]),
        (PBS, [Host("gpu-a", 2), Host("gpu-b")]),
        ("gpu-a\r\n\tgpu-b:2 \r\n", [Host("gpu-a"), Host("gpu-b", 2)]),
    ],
    ids=["open-mpi", "deepspeed", "mpich", "pbs", "windows"],
)
def test_every_host_file_format_is_parsed(text: str, hosts: list[Host]) -> None:
    assert parse_lines(text) == (hosts, [])


def test_every_invalid_line_of_a_host_file_is_reported() -> None:
    hosts, errors = parse_lines("gpu-a slots=x\ngpu-b\n\ngpu-c:2 slots=3\ngpu-d gpu-e\ngpu-f slots=0\n")
    assert hosts == [Host("gpu-b")]
    assert errors == [
        "line 1: expected a host, `HOST:SLOTS` or `HOST slots=N`, got 'gpu-a slots=x'",
        "line 4: gpu-c:2 gives its slots twice; keep one",
        "line 5: expected a host, `HOST:SLOTS` or `HOST slots=N`, got 'gpu-d gpu-e'",
        "line 6: gpu-f has no slots; give it at least one, or remove it",
    ]


@given(st.text())
def test_parsing_any_host_file_yields_hosts_or_errors(text: str) -> None:
    hosts, errors = parse_lines(text)
    assert all(host.slots > 0 for host in hosts)
    assert len(errors) <= len(text.splitlines())


def test_slots_become_workers_and_a_port_becomes_the_ssh_port() -> None:
    [node] = make_host_spec("-H", parse_hosts(["ssh://alice@gpu-a:2222:4"]), None).nodes
    assert node == NodeSpec.model_validate({"host": "alice@gpu-a", "tasks": {"worker": 4}, "ssh": {"port": 2222}})


class TestHostFiles:
    def refused(self, path: Path, *hosts: str) -> str:
        with pytest.raises(UsageError) as caught:
            read_hosts(hosts, path)
        return " ".join([caught.value.sentence, *caught.value.evidence])

    def test_a_missing_host_file_is_named_in_the_error(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts"
        assert self.refused(path) == f"cannot read the host file {path}: No such file or directory; check the path"
        assert "Is a directory" in self.refused(tmp_path)

    @pytest.mark.parametrize("text", ["", "\n \n", "# gpu-a\n"])
    def test_a_host_file_without_a_host_is_an_error(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "hosts"
        path.write_text(text)
        assert self.refused(path).startswith(f"the host file {path} names no host; ")

    def test_an_invalid_host_file_is_an_error_with_the_reason(self, tmp_path: Path) -> None:
        path = tmp_path / "hosts"
        path.write_bytes(b"\xff\xfe")
        assert self.refused(path).startswith(f"the host file {path} is not UTF-8")
        path.write_text("a b\n" * 30)
        assert self.refused(path).startswith(f"the host file {path} has 30 errors line 1: expected a host")
        assert self.refused(path).endswith("and 10 more")
        path.write_bytes(b"a" * (2 << 20))
        assert self.refused(path) == f"the host file {path} is larger than 1 MiB"

    def test_hosts_and_a_host_file_cannot_be_combined(self, tmp_path: Path) -> None:
        assert self.refused(tmp_path, "gpu-a").startswith("-H and --hostfile cannot be combined")

    def test_a_host_name_that_a_spec_rejects_is_reported_with_the_option(self) -> None:
        with pytest.raises(UsageError) as caught:
            make_host_spec("-H", parse_hosts(["gpu a"]), None)
        assert caught.value.message.startswith("-H: nodes[0].host: 'gpu a' is not a host name")


def test_more_slots_than_the_limit_are_rejected() -> None:
    assert parse_hosts([f"gpu-a:{SLOTS_LIMIT}"]) == [Host("gpu-a", SLOTS_LIMIT)]
    with pytest.raises(HostError):
        parse_hosts([f"gpu-a:{SLOTS_LIMIT + 1}"])
