"""The checks before a start, without a machine: what nodes are asked, what follows from their answers, and when."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.checks.preflight import CLOCK_LIMIT_S, LITTLE_SPACE, Preflight
from launcher.gang.decide import FAILURE_GRACE_S
from launcher.gang.events import (
    Action,
    Checked,
    CheckNodes,
    Event,
    Finish,
    NodeEmpty,
    NodeInspected,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSynced,
    PrepareNodes,
    StartTasks,
    StopNodes,
    SyncNodes,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import BEFORE_START, Phase, Reason
from launcher.report.check_report import make_check_report
from launcher.report.check_text import COLUMNS, make_rows, render_findings
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId, parse_task_id
from tests.harness.builders.gang import (
    CTRL_C,
    ONE_NODE,
    START_S,
    TWO_NODES,
    W0,
    W1,
    W2,
    actions_of,
    anything,
    make_policy,
    play,
    play_on,
    replay,
)
from tests.harness.builders.preflights import (
    CHECKPOINTS,
    NONCE,
    A,
    Answered,
    B,
    asked,
    checked,
    checking,
    inspected,
    ready,
    spec_of,
    tell,
)
from tests.harness.builders.verdicts import judged
from worker_entry.protocol.messages import Dialled, Inspected
from worker_entry.protocol.orders import Dial, Inspect
from worker_entry.protocol.values import DialResult, GpuUse, Problem, Program, Target

PORTS = {W0: 20000, W1: 20001}


def make_dial(spec: ClusterSpec, ports: Mapping[TaskId, int]) -> Dial:
    """What the first node dials, if all nodes are usable."""
    nodes = [node.host for node in spec.nodes]
    return Preflight(spec, NONCE).make_dials(nodes, ports)[nodes[0]]


class TestOrders:
    def test_a_node_dials_every_address_of_every_task(self) -> None:
        spec = spec_of({**A, "tasks": {"worker": 2}}, {"host": "gpu-b", "addresses": ["b.lan", "b.wan"]})

        order = make_dial(spec, {W0: 1, W1: 2, W2: 3})

        assert order.targets == [
            Target("worker:0", "10.0.0.11", 1),
            Target("worker:1", "10.0.0.11", 2),
            Target("worker:2", "b.lan", 3),
            Target("worker:2", "b.wan", 3),
        ]
        assert order.nonce == NONCE

    def test_a_node_does_not_dial_an_evaluator(self) -> None:
        spec = spec_of(A, {**B, "tasks": {"evaluator": 1}})

        targets = make_dial(spec, {W0: 1, parse_task_id("evaluator:0"): 2}).targets

        assert targets == [Target("worker:0", "10.0.0.11", 1)]

    def test_a_node_dials_nothing_for_a_single_task(self) -> None:
        assert make_dial(spec_of(A), {W0: 1}).targets == []

    def test_a_node_does_not_dial_tasks_of_unusable_nodes(self) -> None:
        assert [t.task for t in make_dial(spec_of(), {W1: 2}).targets] == ["worker:1"]

    def test_each_node_writes_its_own_mark_into_the_checkpoint_directory(self) -> None:
        preflight = Preflight(spec_of(checkpoint_directory=CHECKPOINTS), NONCE)

        orders = [preflight.make_inspect(node) for node in ("gpu-a", "gpu-b")]

        assert [(order.program, order.shared) for order in orders] == [(Program("script", "train.py"), CHECKPOINTS)] * 2
        assert len({order.mark for order in orders}) == 2
        assert all(NONCE in order.mark for order in orders)

    def test_each_node_looks_for_the_marks_of_all_nodes_that_answered(self) -> None:
        spec = spec_of(A, B, {"host": "gpu-c"}, checkpoint_directory=CHECKPOINTS)
        preflight = Preflight(spec, NONCE)
        for node in ("gpu-a", "gpu-c"):
            tell(preflight, node, ready())

        order = preflight.make_dials(["gpu-a", "gpu-b", "gpu-c"], PORTS)["gpu-a"]

        assert order.shared == CHECKPOINTS
        assert order.marks == [preflight.make_inspect(node).mark for node in ("gpu-a", "gpu-c")]

    def test_no_node_writes_a_mark_without_a_checkpoint_directory(self) -> None:
        preflight = Preflight(spec_of(), NONCE)

        assert preflight.make_inspect("gpu-a") == Inspect(Program("script", "train.py"))
        assert preflight.make_dials(["gpu-a"], PORTS)["gpu-a"].marks == []


class TestCompleteness:
    def test_the_checks_are_complete_after_three_answers_from_every_awaited_node(self) -> None:
        preflight = Preflight(spec_of(), NONCE)
        both, one = frozenset({"gpu-a", "gpu-b"}), frozenset({"gpu-a"})

        for message in (ready(), inspected()):
            tell(preflight, "gpu-a", message)
            assert not preflight.is_complete(one)
        tell(preflight, "gpu-a", Dialled([], []))

        assert preflight.is_complete(one)
        assert not preflight.is_complete(both)

    def test_check_answers_of_a_node_that_was_never_ready_are_ignored(self) -> None:
        preflight = Preflight(spec_of(), NONCE)

        tell(preflight, "gpu-a", inspected(), Dialled([], []))

        assert preflight.answers == {}


class TestAddresses:
    CHOICE = spec_of({"host": "gpu-a", "addresses": ["a.1", "a.2", "a.3"]}, B)

    @pytest.mark.parametrize(
        ("failures", "expected"),
        [
            pytest.param({}, "a.1", id="first-if-all-work"),
            pytest.param({("gpu-b", "a.1"): "refused"}, "a.2", id="first-reached-by-others"),
            pytest.param({("gpu-a", "a.1"): "no-route"}, "a.2", id="first-reached-by-itself"),
            pytest.param(
                {("gpu-a", "a.1"): "timed-out", ("gpu-b", "a.2"): "refused"}, "a.3", id="only-one-reached-by-all"
            ),
            pytest.param({("gpu-b", f"a.{n}"): "refused" for n in (1, 2, 3)}, "a.1", id="first-if-none-works"),
        ],
    )
    def test_the_first_address_that_every_node_reaches_is_chosen(
        self, failures: dict[tuple[str, str], str], expected: str
    ) -> None:
        answered = Answered(self.CHOICE, failures=failures)

        assert answered.preflight.choose_addresses() == {"gpu-a": expected, "gpu-b": "10.0.0.12"}
        assert answered.preflight.render_choices() == [f"gpu-a is reached at {expected}"]

    def test_the_chosen_address_reaches_all_tasks_of_its_node(self) -> None:
        spec = spec_of({"host": "gpu-a", "addresses": ["a.1", "a.2"], "tasks": {"worker": 2}}, B)
        preflight = Answered(spec).preflight
        results = [DialResult(Target("worker:1", "a.1", 20001), ["10.0.0.1"], "refused")]

        tell(preflight, "gpu-b", Dialled(results, []))

        assert preflight.choose_addresses()["gpu-a"] == "a.2"

    def test_a_chosen_address_is_shown_only_if_there_was_a_choice(self) -> None:
        assert Answered(spec_of()).preflight.render_choices() == []

    def test_a_failed_dial_to_an_unused_address_is_no_finding(self) -> None:
        assert Answered(self.CHOICE, failures={("gpu-b", "a.1"): "timed-out"}).findings == []

    def test_a_node_unreachable_at_all_addresses_is_reported_once(self) -> None:
        failures = {("gpu-b", f"a.{n}"): "refused" for n in (1, 2, 3)}

        [finding] = Answered(self.CHOICE, failures=failures).findings

        assert finding.message == "gpu-b cannot reach worker:0 on gpu-a at a.1:20000: connection refused"

    def test_the_check_report_lists_all_dials_with_their_failures(self) -> None:
        dials = Answered(self.CHOICE, failures={("gpu-b", "a.1"): "refused"}).report().dials

        assert [(dial.node, dial.task, dial.address) for dial in dials] == [
            (node, task, address)
            for node in ("gpu-a", "gpu-b")
            for task, address in [
                ("worker:0", "a.1:20000"),
                ("worker:0", "a.2:20000"),
                ("worker:0", "a.3:20000"),
                ("worker:1", "10.0.0.12:20001"),
            ]
        ]
        assert [dial.address for dial in dials if dial.failure] == ["a.1:20000"]


class TestFailedDials:
    @pytest.mark.parametrize(
        ("failure", "message", "hint"),
        [
            (
                "refused",
                "connection refused",
                "another machine may have that address, or a firewall rejects connections",
            ),
            ("timed-out", "no answer", "a firewall may drop packets: open ports 20000-20999 between the nodes"),
            ("no-route", "no route", "the address belongs to another network: set another `address:`"),
            ("other", "something else answers there", "another machine has that address: set another `address:`"),
            ("unknown-name", "the name does not resolve there", "give the node an `address:` in the spec"),
            ("Permission denied", "Permission denied", ""),
        ],
    )
    def test_a_failed_dial_is_reported_with_its_cause_and_hint(self, failure: str, message: str, hint: str) -> None:
        answered = Answered(spec_of(), failures={("gpu-a", "10.0.0.12"): failure})

        [finding] = answered.findings

        assert (finding.level, finding.node, finding.reference) == ("error", "gpu-a", "cannot-reach")
        assert finding.message == f"gpu-a cannot reach worker:1 on gpu-b at 10.0.0.12:20001: {message}"
        assert finding.hint.startswith(hint)
        assert bool(finding.hint) == bool(hint)

    def test_a_failed_dial_shows_the_addresses_of_a_host_name(self) -> None:
        spec = spec_of(A, {"host": "gpu-b", "address": "b.lan"})
        key = ("gpu-a", "b.lan")

        [finding] = Answered(spec, failures={key: "refused"}, resolved={key: ["10.9.9.9", "fd00::9"]}).findings

        assert finding.message.endswith(" at b.lan:20001 (10.9.9.9, fd00::9): connection refused")

    @pytest.mark.parametrize("itself", ["127.0.1.1", "127.0.0.1", "::1"])
    def test_a_host_name_that_resolves_to_the_dialling_node_is_reported(self, itself: str) -> None:
        spec = spec_of(A, {"host": "gpu-b", "address": "b.lan"})
        key = ("gpu-a", "b.lan")

        [finding] = Answered(spec, failures={key: "other"}, resolved={key: [itself]}).findings

        assert finding.message == (
            f"gpu-a cannot reach worker:1 on gpu-b at b.lan:20001: there the name resolves to {itself}, gpu-a itself"
        )
        assert (
            finding.hint
            == "/etc/hosts on gpu-a gives that name to gpu-a itself: correct it, or give gpu-b an `address:`"
        )

    OWN: Mapping[str, Mapping[str, Any]] = {
        "gpu-a": {"addresses": ["10.0.0.11", "fd00::11", "fe80::1"]},
        "gpu-b": {"addresses": ["10.0.0.12", "fe80::2"]},
    }

    @pytest.mark.parametrize(
        ("failure", "cause"),
        [
            ("refused", "a firewall may reject connections"),
            ("timed-out", "a firewall may drop packets"),
            ("no-route", "a firewall may reject connections, as firewalld does"),
        ],
    )
    def test_a_failed_dial_to_an_address_of_the_node_names_the_command_that_opens_its_firewall(
        self, failure: str, cause: str
    ) -> None:
        [finding] = Answered(spec_of(), failures={("gpu-a", "10.0.0.12"): failure}, looks=self.OWN).findings

        assert finding.hint == (
            f"{cause}: open ports 20000-20999 between the nodes; on gpu-b, run: "
            "sudo iptables -I INPUT -p tcp -s 10.0.0.11 --dport 20000:20999 -j ACCEPT"
        )

    def test_the_command_that_opens_a_firewall_names_a_port_that_the_spec_sets(self) -> None:
        answered = Answered(spec_of(ports="30000-30999"), failures={("gpu-a", "10.0.0.12"): "refused"}, looks=self.OWN)

        [finding] = answered.findings

        assert "open ports 20001 between the nodes" in finding.hint  # the answers' port is not in the range
        assert " --dport 20001 " in finding.hint

    def test_a_firewall_against_ipv6_is_opened_by_ip6tables_and_other_addresses_are_named(self) -> None:
        spec = spec_of({**A, "address": "fd00::11"}, {**B, "address": "fd00::12"})
        looks = {**self.OWN, "gpu-b": {"addresses": ["10.0.0.12", "fd00::12"]}}

        [finding] = Answered(spec, failures={("gpu-a", "fd00::12"): "timed-out"}, looks=looks).findings

        assert "run: sudo ip6tables -I INPUT -p tcp -s fd00::11 --dport" in finding.hint
        assert finding.hint.endswith("; or give gpu-b another `address:` of its own (10.0.0.12)")

    @pytest.mark.parametrize("failure", ["refused", "timed-out", "no-route", "other", "unknown-name"])
    def test_a_failed_dial_to_an_address_that_the_node_lacks_names_one_that_it_has(self, failure: str) -> None:
        spec = spec_of(A, {"host": "gpu-b", "address": "10.9.9.9"})

        [finding] = Answered(spec, failures={("gpu-a", "10.9.9.9"): failure}, looks=self.OWN).findings

        assert finding.hint.endswith("; gpu-b itself has 10.0.0.12: --set 'nodes[1].address=10.0.0.12' takes the first")

    def test_a_node_that_cannot_reach_itself_is_reported(self) -> None:
        [finding] = Answered(spec_of(), failures={("gpu-b", "10.0.0.12"): "refused"}).findings

        assert finding.message == "gpu-b cannot reach itself at 10.0.0.12:20001: connection refused"

    def test_every_pair_of_nodes_with_a_failed_dial_is_reported(self) -> None:
        failures = {(node, host): "timed-out" for node in ("gpu-a", "gpu-b") for host in ("10.0.0.11", "10.0.0.12")}

        assert [finding.message.split(" at ")[0] for finding in Answered(spec_of(), failures=failures).findings] == [
            "gpu-a cannot reach itself",
            "gpu-a cannot reach worker:1 on gpu-b",
            "gpu-b cannot reach worker:0 on gpu-a",
            "gpu-b cannot reach itself",
        ]

    def test_a_failed_dial_shows_ipv6_addresses_in_brackets(self) -> None:
        spec = spec_of(A, {"host": "gpu-b", "address": "fd00::12"})

        [finding] = Answered(spec, failures={("gpu-a", "fd00::12"): "no-route"}).findings

        assert " at [fd00::12]:20001: no route" in finding.message

    def test_a_failed_dial_to_an_unknown_task_is_not_reported(self) -> None:
        preflight = Answered(spec_of()).preflight
        strange = DialResult(Target("worker:9", "10.0.0.9", 1), [], "refused")

        tell(preflight, "gpu-b", Dialled([strange], []))

        assert preflight.findings() == []


class TestDifferences:
    @pytest.mark.parametrize(
        ("kind", "fact", "other", "reference", "message"),
        [
            ("facts", "python", "3.12.1", "python-differs", "Python differs: 3.11 on gpu-a; 3.12 on gpu-b"),
            ("facts", "tensorflow", "2.19.0", "tensorflow-differs", "TensorFlow differs: 2.21.0 on gpu-a; 2.19.0 on g"),
            ("facts", "tensorflow", None, "tensorflow-differs", "TensorFlow differs: 2.21.0 on gpu-a; none on gpu-b"),
            ("looks", "keras", "3.11.0", "keras-differs", "Keras differs: 3.15.1 on gpu-a; 3.11.0 on gpu-b"),
            ("looks", "keras", None, "keras-differs", "Keras differs: 3.15.1 on gpu-a; none on gpu-b"),
        ],
    )
    def test_different_versions_on_nodes_are_warnings(
        self, kind: str, fact: str, other: str | None, reference: str, message: str
    ) -> None:
        changes: dict[str, Any] = {kind: {"gpu-b": {fact: other}}}

        [finding] = Answered(spec_of(), **changes).findings

        assert (finding.level, finding.reference) == ("warning", reference)
        assert finding.message.startswith(message)

    def test_another_version_is_reported_with_the_command_that_installs_the_usual_one(self) -> None:
        spec = spec_of(A, B, {"host": "gpu-c"}, {"host": "gpu-d"})
        own = "/opt/tf/bin/python"
        facts: dict[str, dict[str, Any]] = {
            "gpu-a": {"tensorflow": "2.19.0", "executable": own},
            "gpu-b": {"tensorflow": None, "executable": "/usr/bin/python3"},
        }

        [finding] = Answered(spec, facts=facts).findings

        assert finding.hint == (
            f"on gpu-a, run: {own} -m pip install tensorflow==2.21.0; or name a Python that has it with --python; "
            "on gpu-b, run: /usr/bin/python3 -m venv ~/tf && ~/tf/bin/pip install tensorflow==2.21.0; then name that "
            "Python with --python '~/tf/bin/python' (`python:` in a spec)"
        )

    def test_another_python_is_reported_with_the_field_that_names_the_usual_one(self) -> None:
        [finding] = Answered(spec_of(), facts={"gpu-b": {"python": "3.12.1"}}).findings

        assert finding.hint == "name Python 3.11 on gpu-b with `python:`, as in `python: python3.11`"

    @pytest.mark.parametrize(
        ("more", "is_reported"),
        [
            ({}, True),
            ({"program": {"module": "trainer"}}, True),
            ({"program": {"command": ["train"]}}, False),
            ({"framework": "torch"}, False),
            ({"program": {"module": "worker_entry.demo.train"}}, False),  # each node refuses it
        ],
    )
    def test_python_programs_on_nodes_without_tensorflow_get_a_warning_with_a_command(
        self, more: Mapping[str, Any], is_reported: bool
    ) -> None:
        facts = {node: {"tensorflow": None} for node in ("gpu-a", "gpu-b")}

        findings = Answered(spec_of(**more), facts=facts).findings

        assert [(finding.level, finding.reference, finding.message) for finding in findings] == [
            ("warning", "no-tensorflow", "TensorFlow is not installed on gpu-a, gpu-b")
        ] * is_reported
        assert all(finding.hint.startswith("on gpu-a, gpu-b, run: /usr/bin/python3 -m venv") for finding in findings)

    def test_this_machine_without_tensorflow_gets_no_warning(self) -> None:
        spec = spec_of({"host": "local", "tasks": {"worker": 2}})

        assert Answered(spec, facts={"local": {"tensorflow": None}}).findings == []

    def test_different_python_patch_versions_are_no_finding(self) -> None:
        assert Answered(spec_of(), facts={"gpu-b": {"python": "3.11.14"}}).findings == []

    def test_different_programs_on_nodes_are_an_error(self) -> None:
        spec = spec_of(A, B, {"host": "gpu-c"})

        [finding] = Answered(spec, looks={"gpu-b": {"program_hash": "cd" * 32}}).findings

        assert (finding.level, finding.reference) == ("error", "program-differs")
        assert finding.message == (
            "the program is not the same on all nodes: abababababab on gpu-a, gpu-c; cdcdcdcdcdcd on gpu-b"
        )
        assert "--no-check" in finding.hint

    def test_a_node_without_a_program_hash_is_no_finding(self) -> None:
        assert Answered(spec_of(), looks={"gpu-b": {"program_hash": ""}}).findings == []

    def test_different_hashes_of_the_built_in_demo_are_no_finding(self) -> None:
        spec = ClusterSpec.model_validate({"nodes": [A, B]})

        assert Answered(spec, looks={"gpu-b": {"program_hash": "cd" * 32}}).findings == []


class TestCheckpointDirectory:
    SPEC = spec_of(checkpoint_directory=CHECKPOINTS)

    def test_a_checkpoint_directory_with_all_marks_visible_is_ok(self) -> None:
        assert Answered(self.SPEC).findings == []

    def test_an_unshared_checkpoint_directory_is_reported_for_each_node_that_misses_a_mark(self) -> None:
        findings = Answered(self.SPEC, sees={"gpu-a": ["gpu-a"], "gpu-b": ["gpu-b"]}).findings

        told = f"checkpoint_directory {CHECKPOINTS} is not shared: "
        assert [(finding.level, finding.reference, finding.node, finding.message) for finding in findings] == [
            ("error", "checkpoint-not-shared", node, f"{told}{node} does not see what {other} writes there")
            for node, other in [("gpu-a", "gpu-b"), ("gpu-b", "gpu-a")]
        ]

    def test_an_unwritable_checkpoint_directory_is_reported_only_for_that_node(self) -> None:
        seen = {"gpu-a": ["gpu-a"], "gpu-b": ["gpu-a"]}

        [finding] = Answered(self.SPEC, looks={"gpu-b": {"problem": "Read-only file system"}}, sees=seen).findings

        assert (finding.level, finding.reference, finding.node) == ("error", "checkpoint-directory", "gpu-b")
        assert finding.message == (
            f"checkpoint_directory {CHECKPOINTS} cannot be written on gpu-b: Read-only file system"
        )

    @pytest.mark.parametrize("answers", [[], [inspected()]], ids=["before-inspection", "before-dialling"])
    def test_the_checkpoint_directory_of_a_node_lost_during_checks_is_not_reported(
        self, answers: list[Inspected]
    ) -> None:
        preflight = Preflight(self.SPEC, NONCE)
        tell(preflight, "gpu-a", ready(), inspected(), Dialled([], [preflight.make_inspect("gpu-a").mark]))
        tell(preflight, "gpu-b", ready(), *answers)

        assert "checkpoint-not-shared" not in [finding.reference for finding in preflight.findings()]

    def test_no_marks_are_expected_without_a_checkpoint_directory(self) -> None:
        assert Answered(spec_of(), sees={"gpu-a": [], "gpu-b": []}).findings == []


class TestWarnings:
    @pytest.mark.parametrize(
        ("offset", "message"),
        [
            (CLOCK_LIMIT_S - 0.1, None),
            (0.1 - CLOCK_LIMIT_S, None),
            (100.04, "the clock of gpu-b is 100.0 s ahead of ours"),
            (-7.25, "the clock of gpu-b is 7.2 s behind ours"),
        ],
    )
    def test_a_node_clock_off_by_more_than_the_limit_is_a_warning(self, offset: float, message: str | None) -> None:
        findings = Answered(spec_of(), clocks={"gpu-b": offset}).findings

        assert [f.message for f in findings if f.reference == "clock" and f.level == "warning"] == [
            *([message] if message else [])
        ]
        assert len(findings) == bool(message)

    @pytest.mark.parametrize(("free", "warned"), [(LITTLE_SPACE, False), (LITTLE_SPACE - 1, True), (0, True)])
    def test_little_free_disk_space_is_a_warning(self, free: int, warned: bool) -> None:
        assert Answered(spec_of(), looks={"gpu-b": {"free_bytes": free}}).references == ["disk-space"] * warned

    def test_a_gpu_that_another_program_uses_is_a_warning(self) -> None:
        gpus = [GpuUse("0", 100, 24000), GpuUse("1", 20000, 24000)]

        [finding] = Answered(spec_of(), looks={"gpu-b": {"gpus": gpus}}).findings

        assert (finding.level, finding.reference) == ("warning", "gpu-busy")
        assert finding.message == "GPU 1 of gpu-b is busy: 19.5 GiB of 23.4 GiB are in use"

    def test_proxy_variables_on_a_node_are_a_warning(self) -> None:
        [finding] = Answered(spec_of(), looks={"gpu-b": {"proxies": ["https_proxy", "http_proxy"]}}).findings

        assert (finding.level, finding.reference) == ("warning", "proxy")
        assert finding.message.startswith("https_proxy and http_proxy on gpu-b would send workers' traffic through")

    def test_findings_list_errors_before_warnings_in_the_order_of_the_spec(self) -> None:
        answered = Answered(
            spec_of(),
            clocks={"gpu-a": 9.0, "gpu-b": 9.0},
            failures={("gpu-a", "10.0.0.12"): "refused", ("gpu-b", "10.0.0.11"): "refused"},
            order=["gpu-b", "gpu-a"],
        )

        assert [(finding.level, finding.node) for finding in answered.findings] == [
            ("error", "gpu-a"),
            ("error", "gpu-b"),
            ("warning", "gpu-a"),
            ("warning", "gpu-b"),
        ]


class TestReport:
    def test_the_check_report_has_a_row_per_node_and_the_count_of_dials(self) -> None:
        report = Answered(spec_of(), facts={"gpu-a": {"gpus": ["0", "1"]}}, clocks={"gpu-b": -0.0004}).report()

        assert report.ok
        assert make_rows(report) == [
            ("gpu-a", "10.0.0.11", "3.11.7", "2.21.0", "3.15.1", "8", "2", "80 GiB", "+0.000 s"),
            ("gpu-b", "10.0.0.12", "3.11.7", "2.21.0", "3.15.1", "8", "0", "80 GiB", "-0.000 s"),
        ]
        assert {len(row) for row in make_rows(report)} == {len(COLUMNS)}
        assert render_findings(report) == [
            "4 of 4 dials from every node to every task's address were answered",
            "test: ok",
        ]

    def test_the_check_report_shows_each_finding_with_its_hint(self) -> None:
        report = Answered(spec_of(), failures={("gpu-a", "10.0.0.12"): "timed-out"}, clocks={"gpu-a": 3.0}).report()

        assert not report.ok
        assert render_findings(report) == [
            "3 of 4 dials from every node to every task's address were answered",
            "Error: gpu-a cannot reach worker:1 on gpu-b at 10.0.0.12:20001: no answer [cannot-reach]",
            "  a firewall may drop packets: open ports 20000-20999 between the nodes, or try another address",
            "Warning: the clock of gpu-a is 3.0 s ahead of ours [clock]",
            "test: not startable: 1 error",
        ]

    def test_a_check_report_with_only_warnings_is_ok(self) -> None:
        assert Answered(spec_of(), clocks={"gpu-a": 3.0}).report().ok

    def test_the_check_report_of_a_single_task_has_no_dials(self) -> None:
        assert render_findings(Answered(spec_of(A)).report()) == ["test: ok"]

    def test_the_check_report_shows_none_for_missing_tensorflow_and_keras(self) -> None:
        answered = Answered(spec_of(A), facts={"gpu-a": {"tensorflow": None}}, looks={"gpu-a": {"keras": None}})

        assert make_rows(answered.report())[0][3:5] == ("none", "none")

    def test_the_check_report_shows_the_memory_in_use_of_each_gpu(self) -> None:
        answered = Answered(
            spec_of(A), facts={"gpu-a": {"gpus": ["0", "1"]}}, looks={"gpu-a": {"gpus": [GpuUse("1", 3, 24000)]}}
        )

        assert answered.report().nodes[0].gpus == ["0", "1 (3 MiB of 23.4 GiB in use)"]

    def test_the_check_report_includes_usable_nodes_if_another_is_unreachable(self) -> None:
        spec = spec_of()
        preflight = Preflight(spec, NONCE)
        tell(preflight, "gpu-a", ready(), inspected(), Dialled([], []))
        policy = checking(TWO_NODES, only=True)
        policy = replace(policy, nodes={"gpu-a": policy.nodes["a"], "gpu-b": policy.nodes["b"]})
        state, _ = play(policy, NodeLost("gpu-b", "connection refused"), NodeReady("gpu-a"))
        state, _ = play_on(state, NodePrepared("gpu-a", {W0: 20000}), NodeInspected("gpu-a"), Checked())
        state, _ = play_on(state, NodeEmpty("gpu-a"))

        report = make_check_report(spec, preflight, state)

        assert [(node.node, node.usable) for node in report.nodes] == [("gpu-a", True), ("gpu-b", False)]
        assert make_rows(report)[1][:3] == ("gpu-b", "cannot be used", "")
        assert [(finding.level, finding.reference, finding.message) for finding in report.findings] == [
            ("error", "node-unreachable", "node gpu-b cannot be used: connection refused")
        ]

    def test_the_check_report_keeps_known_facts_of_a_node_lost_during_checks(self) -> None:
        report = Answered(spec_of()).report(NodeLost("gpu-b", "the agent ended"), Checked())

        assert [node.usable for node in report.nodes] == [True, False]
        assert report.nodes[1].python == "3.11.7"
        assert [(f.reference, f.node) for f in report.findings] == [("node-lost", "gpu-b")]

    def test_the_check_report_of_a_refusal_names_the_task_and_the_hint(self) -> None:
        problem = Problem("port-taken", "port 20000 is held by pid 7 (nginx)", "end it", "worker:1")

        report = Answered(spec_of()).report(NodeRefused("gpu-b", (problem,)), Checked())

        assert [node.usable for node in report.nodes] == [True, False]
        assert render_findings(report)[1:] == [
            "Error: worker:1 on gpu-b: port 20000 is held by pid 7 (nginx) [port-taken]",
            "  end it",
            "test: not startable: 1 error",
        ]

    def test_the_check_report_of_a_refusing_node_that_ended_shows_only_the_refusal(self) -> None:
        refusal = NodeRefused("gpu-b", (Problem("run-directory", "/home: Read-only file system"),))

        report = Answered(spec_of()).report(refusal, NodeLost("gpu-b", "the agent ended"), Checked())

        assert [finding.message for finding in report.findings] == ["gpu-b: /home: Read-only file system"]

    def test_the_check_report_of_a_timeout_names_the_nodes_that_did_not_answer(self) -> None:
        spec = spec_of()
        preflight = Preflight(spec, NONCE)
        tell(preflight, "gpu-a", ready(), inspected(), Dialled([], []))
        tell(preflight, "gpu-b", ready(), inspected())

        report = make_check_report(spec, preflight, checked(spec, START_S, Tick()))

        assert not report.ok
        assert [node.usable for node in report.nodes] == [True, False]
        assert [(f.reference, f.message) for f in report.findings] == [
            ("start-timeout", "no answer from gpu-b within 600 s")
        ]

    def test_the_check_report_contains_no_control_characters(self) -> None:
        problem = Problem("no-program", "there is no program /x\x1b[2J\r")

        lines = render_findings(Answered(spec_of()).report(NodeRefused("gpu-b", (problem,)), Checked()))

        assert "\x1b" not in "".join(lines)
        assert "\r" not in "".join(lines)


class TestChecksBeforeStart:
    def test_a_start_with_checks_syncs_prepares_checks_and_then_starts(self) -> None:
        policy = checking(TWO_NODES, syncs=["a", "b"])
        state, actions = play(policy, *asked(policy))
        assert (state.phase, actions) == (Phase.CHECKING, [SyncNodes(), PrepareNodes(), CheckNodes()])

        state, actions = play_on(state, Checked())

        assert (state.phase, actions) == (Phase.FORMING, [StartTasks({W0: 20000, W1: 20001})])

    def test_no_task_starts_before_the_checks_are_done(self) -> None:
        policy = checking(TWO_NODES)

        state, actions = play(policy, *asked(policy), START_S - 1, Tick(), Tick())

        assert (state.phase, actions) == (Phase.CHECKING, [PrepareNodes(), CheckNodes()])

    def test_nodes_look_for_marks_only_after_all_nodes_were_inspected(self) -> None:
        policy = checking(TWO_NODES)
        *earlier, last = asked(policy)
        assert isinstance(last, NodeInspected)

        state, actions = play(policy, *earlier)
        assert (state.phase, actions, state.silent) == (Phase.PREPARING, [PrepareNodes()], frozenset("b"))

        assert play_on(state, last)[1] == [CheckNodes()]

    def test_inspections_and_ports_may_arrive_in_any_order(self) -> None:
        policy = checking(TWO_NODES)
        events = asked(policy)

        state, _ = play(policy, *events[:2], *reversed(events[2:]))

        assert state.phase is Phase.CHECKING

    def test_no_node_is_prepared_before_all_nodes_have_the_program(self) -> None:
        policy = checking(TWO_NODES, syncs=["b"])

        state, actions = play(policy, NodeReady("a"), NodeReady("b"), NodeSynced("a", 1, 10))
        assert (state.phase, actions, state.silent) == (Phase.SYNCING, [SyncNodes()], frozenset("b"))

        assert play_on(state, NodeSynced("b", 1, 10))[1] == [PrepareNodes()]

    def test_the_ports_are_reserved_once_all_nodes_have_the_last_checkpoint(self) -> None:
        policy = replace(make_policy(TWO_NODES), restores=frozenset("ab"))
        state, actions = play(policy, NodeReady("a"), NodeReady("b"), NodeSynced("a", 1, 10, checkpoint=True))
        assert (state.phase, actions) == (Phase.SYNCING, [SyncNodes()])
        assert play_on(state, NodeSynced("b", 1, 10))[1] == []  # the program's folder is no checkpoint
        state, actions = play_on(state, NodeSynced("b", 0, 0, checkpoint=True))
        assert (state.restored, actions) == (frozenset("ab"), [PrepareNodes()])

    def test_errors_of_the_checks_prevent_the_start_and_are_all_kept(self) -> None:
        policy = checking(TWO_NODES)
        refusals = [
            NodeRefused(node, (Problem("cannot-reach", f"{node} cannot reach {other}"),))
            for node, other in (("a", "b"), ("b", "a"))
        ]

        state, actions = play(policy, *asked(policy), *refusals, NodeEmpty("a"), NodeEmpty("b"))

        assert actions[2:] == [StopNodes(FAILURE_GRACE_S), Finish()]
        assert (state.reason, state.refusals, state.started) == (Reason.REFUSED, tuple(refusals), {})
        verdict = judged(state)
        assert (verdict.reference, verdict.message) == ("cannot-reach", "a cannot reach b")
        assert verdict.evidence == ["b cannot reach a [cannot-reach]"]

    @pytest.mark.parametrize("length", range(2, 7))
    def test_a_node_lost_during_the_checks_ends_the_attempt_in_every_phase(self, length: int) -> None:
        policy = checking(TWO_NODES)

        state, actions = play(policy, *asked(policy)[:length], NodeLost("b", "the agent ended"), NodeEmpty("a"))

        assert actions[-2:] == [StopNodes(FAILURE_GRACE_S), Finish()]
        assert state.reason is Reason.NODE_LOST

    def test_a_timeout_during_the_checks_names_the_nodes_that_have_not_answered(self) -> None:
        policy = checking(TWO_NODES)

        for length, silent in ((1, "b"), (2, "a, b"), (3, "a, b"), (4, "a, b"), (5, "b")):
            state, _ = play(policy, *asked(policy)[:length], START_S, Tick(), NodeEmpty("a"), NodeEmpty("b"))

            assert judged(state).message == f"no answer from {silent} within 600 s"

    def test_unrequested_inspections_are_ignored(self) -> None:
        plain = make_policy(TWO_NODES)
        early = checking(TWO_NODES)

        assert play(plain, NodeReady("a"), NodeReady("b"), NodeInspected("a"))[0].inspected == frozenset()
        assert play(early, NodeReady("a"), NodeInspected("a"))[0].inspected == frozenset()

    def test_an_early_checked_event_does_not_start_tasks(self) -> None:
        policy = checking(TWO_NODES)
        events = asked(policy)

        for length in range(len(events)):
            assert StartTasks not in map(type, play(policy, *events[:length], Checked())[1])


class TestOnlyChecks:
    def test_a_check_only_attempt_ends_without_starting_tasks(self) -> None:
        policy = checking(TWO_NODES, only=True)

        state, actions = play(policy, *asked(policy), Checked(), NodeEmpty("a"), NodeEmpty("b"))

        assert actions == [PrepareNodes(), CheckNodes(), StopNodes(0.0), Finish()]
        assert (state.phase, state.reason) == (Phase.FINISHED, Reason.CHECKED)

    @pytest.mark.parametrize(
        "way", [NodeLost("b", "connection refused"), NodeRefused("b", ())], ids=["lost", "refused"]
    )
    @pytest.mark.parametrize("length", range(13))
    def test_a_check_only_attempt_continues_without_unusable_nodes(self, way: Event, length: int) -> None:
        policy = checking({"a": [W0], "b": [W1], "c": [W2]}, only=True, syncs=["a", "b", "c"])
        events = asked(policy)
        rest = [event for event in events[length:] if getattr(event, "node", "") != "b"]
        told = [*events[:length], way, *rest, Tick(), Checked(), NodeEmpty("a"), NodeEmpty("c"), NodeEmpty("b")]

        state, actions = play(policy, *told)

        assert actions == [SyncNodes(), PrepareNodes(), CheckNodes(), StopNodes(0.0), Finish()]
        assert (state.reason, state.awaited) == (Reason.CHECKED, frozenset("ac"))

    def test_a_check_only_attempt_dials_only_tasks_of_usable_nodes(self) -> None:
        policy = checking(TWO_NODES, only=True)

        state, _ = play(policy, NodeReady("a"), NodeReady("b"), NodeRefused("b", ()), NodePrepared("a", {W0: 20000}))

        assert state.ports == {W0: 20000}

    def test_a_check_only_attempt_ends_when_no_node_can_be_reached(self) -> None:
        policy = checking(TWO_NODES, only=True)

        state, actions = play(policy, NodeLost("a", "refused"), NodeLost("b", "unknown name"))

        assert (actions, state.reason, state.phase) == ([Finish()], Reason.CHECKED, Phase.FINISHED)
        assert state.lost == {"a": "refused", "b": "unknown name"}

    @pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one-node", "two-nodes"])
    @pytest.mark.parametrize("refuse", [True, False], ids=["refused", "lost"])
    def test_a_check_only_attempt_ends_in_any_phase_when_the_last_node_fails(
        self, layout: dict[str, list[TaskId]], refuse: bool
    ) -> None:
        policy = checking(layout, only=True)
        events = asked(policy)
        gone: list[Event] = [NodeRefused(n, ()) if refuse else NodeLost(n, "the agent ended") for n in layout]

        for length in range(len(events) + 1):
            # With no node left, `Checked` is an event only after the checks have started.
            told: list[Event] = [*events[:length], *gone, Tick(), Tick(), Checked(), *map(NodeEmpty, layout)]
            state, actions = play(policy, *told)

            assert (state.phase, state.reason, actions[-1]) == (Phase.FINISHED, Reason.CHECKED, Finish())

    def test_a_check_only_attempt_ends_at_the_start_timeout(self) -> None:
        policy = checking(TWO_NODES, only=True)

        for length in range(len(asked(policy)) + 1):
            state, actions = play(policy, *asked(policy)[:length], START_S, Tick(), NodeEmpty("a"), NodeEmpty("b"))

            assert (state.reason, actions[-1]) == (Reason.START_TIMEOUT, Finish())

    def test_a_check_only_attempt_does_not_wait_for_lost_nodes(self) -> None:
        policy = checking(TWO_NODES, only=True)

        assert play(policy, NodeReady("a"))[0].silent == {"b"}
        assert play(policy, NodeReady("a"), NodeLost("b", "refused"))[0].silent == {"a"}  # it still has to prepare

    def test_ctrl_c_ends_a_check_only_attempt_in_every_phase(self) -> None:
        policy = checking(TWO_NODES, only=True)

        for length in range(len(asked(policy)) + 1):
            state, _ = play(policy, *asked(policy)[:length], CTRL_C, NodeEmpty("a"), NodeEmpty("b"))

            assert (state.phase, state.reason) == (Phase.FINISHED, Reason.INTERRUPTED)
            assert state.signal == signal.SIGINT


# --- properties of every history ---------------------------------------------------------------------------


LAYOUTS: tuple[dict[str, list[TaskId]], ...] = ({"a": [W0]}, ONE_NODE, TWO_NODES)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    anything,
    st.sampled_from(["a", "b", "unknown"]).map(NodeInspected),
    st.sampled_from(["a", "b", "unknown"]).map(lambda node: NodeSynced(node, 1, 10)),
    st.just(Checked()),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[AttemptPolicy, list[tuple[float, Event]]]:
    """Histories of gangs that check their nodes, and may send the program first."""
    layout = draw(st.sampled_from(LAYOUTS))
    policy = checking(layout, only=draw(st.booleans()), syncs=draw(st.lists(st.sampled_from(sorted(layout)))))
    policy = replace(policy, start_s=draw(st.sampled_from([0.0, 600.0])))
    sensible = [*asked(policy), Checked()]
    for event in draw(st.lists(EVENTS, max_size=4)):
        sensible.insert(draw(st.integers(0, len(sensible))), event)
    events = [*sensible[: draw(st.integers(0, len(sensible)))], *draw(st.lists(EVENTS, max_size=12))]
    now, history = 0.0, []
    for event in events:
        now += draw(st.sampled_from([0.0, 0.0, 0.5, 50.0]))
        history.append((now, event))
    return policy, history


class TestEveryHistory:
    @given(histories())
    def test_actions_of_a_checking_gang_follow_the_only_valid_order(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        kinds = [type(action) for action in actions_of(replay(*told))]

        order: tuple[type[Action], ...] = (SyncNodes, PrepareNodes, CheckNodes, StartTasks, StopNodes, Finish)
        assert kinds == sorted(kinds, key=order.index)
        assert all(kinds.count(kind) <= 1 for kind in order if kind is not StopNodes)

    @given(histories())
    def test_no_history_dials_before_every_awaited_node_is_inspected(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        for _, action, after in replay(*told):
            if isinstance(action, CheckNodes):
                assert after.awaited <= after.ready & after.prepared & after.inspected

    @given(histories())
    def test_no_history_starts_tasks_unchecked_or_in_check_only_mode(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, _ = told
        for before, action, after in replay(*told):
            if isinstance(action, StartTasks):
                assert not policy.only_checks
                assert before.phase is Phase.CHECKING
                assert not after.lost
                assert not after.refusals

    @given(histories())
    def test_every_history_with_checks_ends_or_names_the_awaited_node(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, history = told
        end = history[-1][0] if history else 0.0

        steps = replay(policy, [*history, *((end + 1e6 * turn, Tick()) for turn in (1, 2, 3))])

        state = steps[-1][2]
        if state.phase in BEFORE_START:
            assert policy.start_s == 0
            assert state.silent or state.phase is Phase.CHECKING  # the awaited node can be named
        elif policy.only_checks:
            assert state.phase is Phase.FINISHED
