"""`distlaunch doctor`: the facts that it finds, and what it reports about them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.gang.checks.findings import Finding
from launcher.report.doctor import COSTS, HERE, DoctorReport, OwnFacts, make_report, render
from launcher.report.models import CheckReport, FactsReport, NodeReport
from tests.harness.hosts.namespaces import Network, opened_network
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.doctor import run
from worker_entry.system import features

COVERS = (
    "launcher/cli/doctor.py",
    "launcher/commands/doctor.py",
    "launcher/report/doctor.py",
    "launcher/report/check_report.py",
    "launcher/controller/preview.py",
    "worker_entry/system/features.py",
    "worker_entry/agent/checks",
)

PORTS = (20000, 20999)


def own_of(**changes: Any) -> OwnFacts:
    usual: dict[str, Any] = {
        "version": "1.2", "state": "/state", "state_problem": "", "state_free": 1 << 40, "config": "", "keys": ["id"],
        "locked_keys": [], "key_problem": "", "known_hosts": 3, "proxies": [], "tools": {"ssh": "/usr/bin/ssh"},
    }  # fmt: skip
    return OwnFacts(**{**usual, **changes})


def facts_of(**changes: Any) -> FactsReport:
    usual: dict[str, Any] = {
        "kernel": "Linux 6.1", "missing": [], "memory": 8 << 30, "open_files": None, "outgoing_ports": (32768, 60999),
        "reserved_ports": "", "driver": None, "tensorflow_gpus": None,
    }  # fmt: skip
    return FactsReport(**{**usual, **changes})


def node_of(host: str = "local", facts: FactsReport | None = None, **changes: Any) -> NodeReport:
    usual: dict[str, Any] = {
        "usable": True, "hostname": host, "python": "3.11.2", "executable": "/usr/bin/python3", "tensorflow": "2.21.0",
        "keras": "3.15.1", "cores": 2, "free_bytes": 1 << 40, "clock_offset_s": 0.001,
    }  # fmt: skip
    return NodeReport(node=host, facts=facts or facts_of(), **{**usual, **changes})


def examined(*nodes: NodeReport, own: OwnFacts | None = None, findings: tuple[Finding, ...] = ()) -> DoctorReport:
    check = CheckReport(name="x", ok=not findings, nodes=[*nodes], dials=[], findings=[*findings])
    return make_report(own or own_of(), check, PORTS)


def bad(report: DoctorReport) -> list[tuple[str, str, str, str]]:
    """The place, level, subject and hint of each line that is not ok."""
    return [(line.place, line.level, line.subject, line.hint) for line in report.lines if line.level != "ok"]


def test_doctor_reports_no_problems_on_a_healthy_machine() -> None:
    report = examined(node_of())
    assert (report.ok, bad(report), {line.hint for line in report.lines}) == (True, [], {""})
    assert render(report)[-1] == "No problems found."


@pytest.mark.parametrize(
    ("changes", "level", "subject", "hint"),
    [
        ({"state_problem": "Read-only file system"}, "error", "state folder", "set XDG_STATE_HOME, or use --run-dir"),
        ({"state_free": 1 << 20}, "warning", "state folder", "`distlaunch prune --dry-run` shows what old runs take"),
        ({"keys": []}, "warning", "ssh keys", "make one with ssh-keygen"),
        ({"keys": [], "locked_keys": ["~/.ssh/id"]}, "warning", "locked keys", "unlock with ssh-add"),
        ({"keys": [], "key_problem": "cannot read ~/.ssh/config"}, "warning", "ssh keys", "correct ~/.ssh/config"),
    ],
)
def test_doctor_gives_a_hint_for_each_problem_of_this_machine(
    changes: dict[str, Any], level: str, subject: str, hint: str
) -> None:
    report = examined(node_of(), own=own_of(**changes))
    assert bad(report) == [(HERE, level, subject, hint)]
    assert report.ok == (level != "error")


@pytest.mark.parametrize(
    ("facts", "node", "level", "subject", "said"),
    [
        ({}, {"tensorflow": None}, "warning", "TensorFlow", "not installed"),
        ({}, {"keras": None}, "warning", "Keras", "not installed"),
        ({"tensorflow_gpus": 0}, {"gpus": ["0", "1"]}, "error", "GPUs", "2 GPUs, but TensorFlow sees none of them"),
        ({"tensorflow_gpus": 1, "driver": "550.1"}, {"gpus": ["0", "1"]}, "error", "GPUs", "driver 550.1, but "),
        ({}, {"gpus": ["0"]}, "error", "GPUs", "1 GPU, but TensorFlow cannot be imported"),
        ({"open_files": 256}, {}, "warning", "open files", "at most 256 per process"),
        ({"outgoing_ports": (1024, 65535)}, {}, "warning", "ports", "gives ports of 20000-20999 to outgoing"),
        ({"outgoing_ports": (20999, 65535)}, {}, "warning", "ports", "(20999-65535)"),
        ({"missing": ["port-filter"]}, {}, "warning", "port-filter", "missing: other machines can connect"),
    ],
)
def test_doctor_gives_a_hint_for_each_problem_of_a_node(
    facts: dict[str, Any], node: dict[str, Any], level: str, subject: str, said: str
) -> None:
    report = examined(node_of("gpu-a", facts_of(**facts), **node))
    [line] = [line for line in report.lines if line.level != "ok"]
    assert (line.place, line.level, line.subject, bool(line.hint)) == ("gpu-a", level, subject, True)
    assert said in line.message


@pytest.mark.parametrize(
    ("facts", "node"),
    [
        ({"tensorflow_gpus": 2, "driver": "550.1"}, {"gpus": ["0", "1"]}),
        ({}, {"gpus": ["0"], "tensorflow": None}),
        ({"outgoing_ports": (21000, 65535)}, {}),
        ({"outgoing_ports": (1024, 65535), "reserved_ports": "8080,20000-21000"}, {}),
        ({"outgoing_ports": None, "memory": None}, {}),
    ],
)
def test_doctor_does_not_report_harmless_facts_of_a_node(facts: dict[str, Any], node: dict[str, Any]) -> None:
    lines = [line.subject for line in examined(node_of("a", facts_of(**facts), **node)).lines if line.level != "ok"]
    assert set(lines) <= {"TensorFlow"}


def test_doctor_lists_check_findings_under_their_node() -> None:
    finding = Finding(level="error", node="gpu-b", reference="node-unreachable", message="no route", hint="look there")
    report = examined(node_of(), NodeReport(node="gpu-b", usable=False), findings=(finding,))
    assert bad(report) == [("gpu-b", "error", "node-unreachable", "look there")]
    assert render(report)[-4:] == [
        "gpu-b", f"  error    {'node-unreachable'}  no route", f"  {'':7}  {'':16}  → look there", "", "1 error",
    ][-4:]  # fmt: skip


def test_doctor_reports_only_known_facts_of_an_uninspected_node() -> None:
    node = NodeReport(node="gpu-a", usable=False, hostname="gpu-a", python="3.11.2", executable="/usr/bin/python3")
    lines = [line.subject for line in examined(node).lines if line.place == "gpu-a"]
    assert lines == ["Python"]


class TestSystemFeatures:
    def test_doctor_has_a_cost_and_a_remedy_for_each_system_feature(self) -> None:
        assert features.ATTEMPTS.keys() == COSTS.keys()

    def test_required_system_features_are_present_on_linux(self) -> None:
        facts = features.examine()
        assert set(facts.missing) <= {"namespaces", "memory-group"}  # which containers may lack
        assert facts.kernel.startswith("Linux ")
        assert facts.memory > 1 << 28

    def test_system_features_that_fail_are_listed_as_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise OSError(1, "not permitted")

        for name in COSTS:
            with monkeypatch.context() as patch:
                patch.setitem(features.ATTEMPTS, name, refuse)
                assert name in features.examine().missing


@pytest.mark.slow
@pytest.mark.smoke
def test_doctor_examines_this_machine_and_its_json_matches_the_schema(tmp_path: Path) -> None:
    status, report = run(env={"XDG_STATE_HOME": str(tmp_path)})
    schema = subprocess.run(distlaunch_command("schema", "doctor"), capture_output=True, text=True, check=True).stdout
    jsonschema.validate(report, json.loads(schema), jsonschema.Draft202012Validator)
    subjects = {line["subject"]: line for line in report["lines"]}
    assert {"distlaunch", "state folder", "ssh keys", "Python", "TensorFlow", "machine", "GPUs", "ports"} <= {*subjects}
    assert subjects["state folder"]["message"].startswith(f"{tmp_path}/distlaunch/runs, ")
    assert sys.executable in subjects["Python"]["message"]
    assert (status, report["ok"]) == (0, True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_doctor_reports_an_unwritable_state_folder_as_an_error() -> None:
    status, report = run(env={"XDG_STATE_HOME": "/proc/none"})
    [line] = [line for line in report["lines"] if line["level"] == "error"]
    assert (status, line["subject"]) == (3, "state folder")


@pytest.mark.slow
def test_doctor_rejects_a_missing_python_interpreter(tmp_path: Path) -> None:
    command = distlaunch_command("doctor", "--python", "/no/python")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no Python interpreter at /no/python" in done.stderr


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with opened_network(tmp_path_factory) as opened:
        yield opened


@pytest.mark.ssh
def test_doctor_examines_hosts_over_ssh_and_reports_an_unreachable_one(network: Network) -> None:
    words = ("doctor", "--json", "-H", "gpu-a,gpu-b,gpu-none", "--python", sys.executable)
    done = network.run(distlaunch_command(*words))
    report = json.loads(done.stdout)
    by_place: dict[str, dict[str, str]] = {}
    for line in report["lines"]:
        by_place.setdefault(line["place"], {})[line["subject"]] = line["level"]
    for host in ("gpu-a", "gpu-b"):
        assert {"Python", "TensorFlow", "machine", "disk", "clock", "ports"} <= {*by_place[host]}
        assert "error" not in by_place[host].values()
    assert by_place["gpu-none"] == {"node-unreachable": "error"}
    assert by_place[HERE]["ssh keys"] == "ok"
    assert done.returncode == 3
