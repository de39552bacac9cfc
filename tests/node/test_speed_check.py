"""The speed check on real hosts with a cable or a processor that is slow on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.harness.hosts.namespaces import Network, running_network
from tests.harness.hosts.shaping import preferred, shape, slow_host, slow_link
from tests.harness.hosts.sshd import SSHD
from tests.harness.processes.commands import Ran, distlaunch_command
from worker_entry.agent.checks.calls import CALLER, MODES, make_call, read_call
from worker_entry.agent.checks.speed_child import SpeedChild
from worker_entry.protocol.speed import MeasureNode, NodeMeasured

COVERS = (
    "launcher/gang/checks/findings.py",
    "launcher/gang/checks/speed.py",
    "launcher/gang/checks/preflight.py",
    "worker_entry/agent/checks",
    "worker_entry/task/speed.py",
)

SHOW = "program: {command: [printenv, DISTLAUNCH_TASK]}\n"
A_TO_B = "the link between gpu-a and gpu-b is slow: network "
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None or not Path(SSHD).exists(),
    reason="network namespaces need root, iproute2 and OpenSSH's server",
)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Three hosts whose cables carry a gigabit."""
    with running_network(tmp_path_factory.mktemp("speed"), count=3) as started:
        shape(started.hosts.values())
        with preferred(started.hosts.values()):
            yield started


@pytest.fixture(scope="module")
def bare_python(network: Network) -> str:
    """A Python that has neither TensorFlow nor numpy: it needs no time to import them."""
    folder = network.folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def check(network: Network, spec: str) -> dict[str, Any]:
    """The report of `check --speed --json`; slow parts are warnings, so the status is 0."""
    done = network.run(distlaunch_command("check", "--speed", "--json", spec))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def messages(report: dict[str, Any]) -> list[str]:
    return [finding["message"] for finding in report["speed"]["findings"]]


@pytest.mark.ssh
@needs_namespaces
def test_check_speed_shows_hosts_and_links_in_two_tables(network: Network, bare_python: str) -> None:
    """The benchmark checks that equal hosts are not named; here, they share their cores with other tests."""
    spec = network.write_spec(f"{SHOW}guard: off\n", python=bare_python)
    done = network.run(distlaunch_command("check", "--speed", spec))
    assert done.returncode == 0, done.stdout
    _, nodes, links, *_ = done.stdout.split("\n\n")
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    columns, *rows = nodes.splitlines()
    assert re.split(r"\s{2,}", columns) == ["node", "matrix product", "memory copy", "by"]
    for row, name in zip(rows, network.hosts, strict=True):
        assert re.fullmatch(rf"{name} +[\d.]+ GFLOP/s +[\d.]+ GB/s +{version}", row)
    columns, *rows = links.splitlines()[:4]
    assert re.split(r"\s{2,}", columns) == ["link", "there", "back", "latency"]
    for row, pair in zip(rows, ("gpu-a to gpu-b", "gpu-b to gpu-c", "gpu-c to gpu-a"), strict=True):
        figures = re.fullmatch(rf"{pair} +([\d.]+) MB/s +([\d.]+) MB/s +[\d.]+ ms", row)
        assert figures is not None
        assert all(0 < float(figure) < 200 for figure in figures.groups())  # a gigabit


@pytest.mark.ssh
@needs_namespaces
def test_up_warns_about_a_slow_link_continues_and_reports_it(
    network: Network, bare_python: str, tmp_path: Path
) -> None:
    spec = network.write_spec(f"{SHOW}check_speed: true\n", python=bare_python)
    a, b, _ = network.hosts.values()
    with slow_link(a, b):
        ran = up(network, spec, tmp_path)
    assert ran.status == 0, ran.stderr
    # Other tests may slow down a host and its links while this one measures.
    warnings = [line for line in ran.stderr.splitlines() if line.startswith("Warning")]
    assert any(A_TO_B in warning and warning.endswith(", from gpu-a to gpu-b") for warning in warnings), warnings
    report = json.loads((ran.directory / "report.json").read_text())
    schema = json.loads(subprocess.run(distlaunch_command("schema", "report"), capture_output=True, check=True).stdout)
    jsonschema.validate(report, schema, jsonschema.Draft202012Validator)
    assert [node["node"] for node in report["speed"]["nodes"]] == ["gpu-a", "gpu-b", "gpu-c"]
    assert all(any(message in warning for warning in warnings) for message in messages(report))
    assert report["attempts"][0]["processes_left"] == 0


@pytest.mark.ssh
@pytest.mark.tensorflow
@pytest.mark.slow
@needs_namespaces
def test_check_speed_names_a_host_with_a_cpu_quota_as_slow(network: Network) -> None:
    with slow_host(network.hosts["gpu-b"]):
        report = check(network, network.write_spec(SHOW))
    assert any(message.startswith("gpu-b is slow: matrix product ") for message in messages(report)), report["speed"]
    assert {node["method"] for node in report["speed"]["nodes"]} == {"TensorFlow on CPU"}


def up(network: Network, spec: str, tmp_path: Path) -> Ran:
    directory = tmp_path / "run"
    done = network.run(distlaunch_command("up", "--run-dir", str(directory), spec))
    return Ran(done.returncode, done.stdout, done.stderr, directory)


# --- the parts on a node ---


class Node:
    """The speed child of an agent, and its messages."""

    def __init__(self) -> None:
        self.said: list[NodeMeasured] = []
        self.selector = selectors.DefaultSelector()
        self.child = SpeedChild(self.selector, self.said.append)

    def measure(self, method: str, *, only_starts: bool = False, **env: str) -> NodeMeasured:
        self.child.measure(MeasureNode(method, env, [], only_starts))
        while not self.said:
            for key, _ in self.selector.select(60):
                key.data()
        return self.said.pop()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    with contextlib.closing(made.selector):
        yield made
        made.child.end()


def test_the_measuring_process_is_started_once_and_ends_with_the_checks(node: Node) -> None:
    assert node.measure("python", only_starts=True).gflop_s == 0.0
    [pid] = node.child.pids
    for _ in range(2):
        measured = node.measure("python")
        assert measured.gflop_s > 0  # little if the lines of the process are counted
        assert measured.memory_gb_s > 0
        assert node.child.pids == {pid}
    node.child.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_failed_speed_measurement_reports_its_reason(node: Node, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no libgfortran')")
    failed = node.measure("numpy", only_starts=True, PYTHONPATH=str(tmp_path))
    assert failed.problem == "ImportError: no libgfortran"
    (tmp_path / "numpy.py").write_text("import os; print('Segmentation fault'); os.abort()")
    assert node.measure("numpy", only_starts=True, PYTHONPATH=str(tmp_path)).problem.endswith(
        "has died, or took too long"
    )
    assert node.measure("numpy").problem == "the measuring process has ended"


def test_a_measurement_request_without_the_nonce_is_refused() -> None:
    for mode in (CALLER, *MODES):
        call = make_call("5f3a", "worker:0", "s", "c", mode)
        answer = read_call(call, "5f3a", "worker:0", "s")
        assert answer is not None
        assert answer[0] == mode
        for other in (("other", "worker:0", "s"), ("5f3a", "worker:1", "s"), ("5f3a", "worker:0", "t")):
            assert read_call(call, *other) is None
    for said in (b"", b"\n", b"c \n", b"\xff \xff\n"):
        assert read_call(said, "5f3a", "worker:0", "s") is None
