"""worker_entry is sent to a node once: the node asks for it, and each later start finds it there, or asks again."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launcher.spec.models import ClusterSpec
from launcher.transports.base import LinkError
from launcher.transports.connector import Opening
from launcher.transports.payload import IF_THERE, make_payload
from launcher.transports.programs import ProgramConnector, ProgramStream
from launcher.transports.streams import ask, bring_archive
from launcher.transports.targets import name_python
from tests.harness.processes.agent_streams import FarEnd
from tests.harness.witness import await_none_left, make_mark, wait_until
from worker_entry.bootstrap import install
from worker_entry.bootstrap.install import FILES, HERE, MISSING
from worker_entry.protocol.framing import MARKER, ProtocolError
from worker_entry.protocol.messages import Cleaned
from worker_entry.protocol.orders import VERSION, Clean

PAYLOAD = make_payload("clean")
DIGEST = hashlib.sha256(PAYLOAD.archive).hexdigest()


class Node:
    """A node's home folder; `start` runs the payload there, as every connection does."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def installed(self) -> Path:
        [place] = (self.home / ".cache" / "distlaunch").iterdir()
        return place

    def start(self, *, brings: bool) -> bytes:
        """Returns the node's whole output; the node gets the archive only if `brings`."""
        said = PAYLOAD.opening(sys.executable) + (PAYLOAD.archive if brings else b"")
        env = {**os.environ, "HOME": str(self.home)}
        env.pop("XDG_CACHE_HOME", None)
        # Its own version: another test, or a run on this machine, may have installed the real one in /var/tmp.
        words = [word.replace(DIGEST, hashlib.sha256(bytes(self.home)).hexdigest()) for word in PAYLOAD.words]
        return subprocess.run(words, input=said, env=env, capture_output=True, timeout=60).stdout


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    assert node.start(brings=True).startswith(MISSING + HERE)
    return node


def test_an_installed_worker_entry_is_not_requested_again(node: Node) -> None:
    assert node.start(brings=False).startswith(HERE)


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"import", b"impart"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: (place / "worker_entry" / "agent" / "agent.py").unlink(),
        lambda place: (place / "worker_entry" / "agent" / "agent.py").write_bytes(b""),
        lambda place: edit(place / "worker_entry" / "agent" / "agent.py"),
        lambda place: (place / FILES).unlink(),
        lambda place: (place / FILES).write_text("[[1"),
        lambda place: (place / FILES).write_text("null"),
        lambda place: (place / FILES).write_text('[["worker_entry"]]'),
    ],
    ids=["removed", "emptied", "edited", "no list", "half a list", "another list", "short list"],
)
def test_a_damaged_worker_entry_is_requested_again_and_repaired(node: Node, damage: Callable[[Path], object]) -> None:
    module = node.installed / "worker_entry" / "agent" / "agent.py"
    content = module.read_bytes()
    damage(node.installed)
    assert node.start(brings=True).startswith(MISSING + HERE)
    assert module.read_bytes() == content
    assert node.start(brings=False).startswith(HERE)


def test_a_connection_that_ends_before_the_archive_is_reported_and_installs_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    said = node.start(brings=False)
    assert said.startswith(MISSING)
    assert b"the connection ended before worker_entry was complete" in said
    assert node.start(brings=True).startswith(MISSING + HERE)


@pytest.mark.parametrize("is_there", [True, False])
def test_an_optional_interpreter_is_used_if_it_exists(tmp_path: Path, is_there: bool) -> None:
    """For example, the virtual environment of the same path."""
    for place in ("virtual environment", "path"):
        python = tmp_path / place / "python3"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\necho in the {place}\n")
        python.chmod(0o755 if place == "path" or is_there else 0o644)
    wanted = f"{IF_THERE}{tmp_path}/virtual environment/python3"
    env = {"PATH": f"{tmp_path}/path:{os.environ['PATH']}"}
    done = subprocess.run(PAYLOAD.words, input=PAYLOAD.opening(wanted), env=env, capture_output=True, timeout=60)
    assert done.stdout == (b"in the virtual environment\n" if is_there else b"in the path\n")


@pytest.mark.parametrize(
    ("prefix", "spec", "asked"),
    [
        ("/home/alice/venv", {}, "?/home/alice/venv/bin/python3"),
        ("/home/alice/venv", {"python": "/opt/python"}, "/opt/python"),
        (sys.base_prefix, {}, "python3"),
    ],
    ids=["venv", "named", "no-venv"],
)
def test_a_remote_node_uses_this_virtual_environment_unless_the_spec_names_a_python(
    monkeypatch: pytest.MonkeyPatch, prefix: str, spec: dict[str, str], asked: str
) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    cluster = ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}], **spec})
    assert name_python(cluster, cluster.nodes[0]) == asked


def test_searching_for_an_installed_worker_entry_creates_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "folders", lambda: [str(tmp_path / "cache"), str(tmp_path / "shared")])
    assert install.find("0") is None
    assert [*tmp_path.iterdir()] == []


def test_a_query_to_a_node_installs_worker_entry_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for _ in range(2):
        stream = ProgramConnector((), "node").open(PAYLOAD, sys.executable, Opening())
        assert isinstance(ask(stream, Clean(VERSION, [], None), 20.0), Cleaned)


# --- the controller's side ---


class Piecewise(FarEnd):
    """A stream that returns as many bytes as requested; `later` only after the archive has arrived."""

    def __init__(self, data: bytes, later: bytes = b"") -> None:
        super().__init__(archive=b"the archive")
        self.data, self._later = data, later

    def read(self, size: int, timeout_s: float) -> bytes:
        if not self.data:
            wait_until(lambda: bytes(self.to_agent) == self.archive, "the archive is written", timeout_s)
            self.data = self._later
        data, self.data = self.data[:size], self.data[size:]
        return data


@pytest.mark.parametrize("noise", [b"", b"motd\n" * 9, HERE[:7], HERE[:-1], MISSING[:9] + HERE[:20], b"\x1e" * 40])
def test_the_bootstrap_reads_no_byte_after_the_answer_of_the_node(noise: bytes) -> None:
    stream = Piecewise(noise + HERE + MARKER)
    bring_archive(stream, 5.0)
    assert (stream.data, bytes(stream.to_agent)) == (MARKER, b"")


def test_a_missing_archive_is_sent_before_anything_else() -> None:
    stream = Piecewise(b"motd\n" + MISSING, later=HERE + MARKER)
    bring_archive(stream, 20.0)
    assert (stream.data, bytes(stream.to_agent)) == (MARKER, b"the archive")


def test_a_node_that_requests_the_archive_twice_is_refused() -> None:
    with pytest.raises(ProtocolError, match="another request"):
        bring_archive(Piecewise(MISSING + MISSING), 5.0)


def open_program(program: str, environ: Mapping[str, str] | None = None) -> ProgramStream:
    connector = ProgramConnector(("sh", "-c", program), "node", environ=environ)
    return connector.open(PAYLOAD, sys.executable, Opening())


@pytest.mark.parametrize("program", ["sleep 600", r"printf '\036worker_entry: none\036\n'; exec sleep 600"])
def test_a_connection_program_that_reads_nothing_is_killed_after_a_timeout(program: str) -> None:
    """Even if it has asked for the archive, which does not fit into a pipe's buffer; and with what it has started."""
    mark = make_mark()
    stream = open_program(program, {**os.environ, **mark})
    with pytest.raises(LinkError, match="the agent does not start: no data for"):
        bring_archive(stream, 0.5)
    stream.abandon()
    assert stream.exit_status() == -signal.SIGKILL
    await_none_left(mark)
