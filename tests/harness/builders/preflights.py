"""Checks before a start, with answers of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.gang.checks.findings import Finding
from launcher.gang.checks.preflight import Preflight
from launcher.gang.events import (
    Checked,
    Event,
    NodeEmpty,
    NodeInspected,
    NodePrepared,
    NodeReady,
    NodeSynced,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Phase
from launcher.report.check_report import make_check_report
from launcher.report.models import CheckReport
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId
from tests.harness.builders.gang import (
    make_policy,
    play,
    ports_of,
)
from worker_entry.protocol.messages import Dialled, Inspected, Ready
from worker_entry.protocol.orders import VERSION
from worker_entry.protocol.values import DialResult

NONCE = "5f3a"
A = {"host": "gpu-a", "address": "10.0.0.11"}
B = {"host": "gpu-b", "address": "10.0.0.12"}
TRAIN = {"script": "train.py"}
CHECKPOINTS = "/mnt/checkpoints"


def spec_of(*nodes: Mapping[str, Any], **more: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "test", "nodes": nodes or (A, B), "program": TRAIN, **more})


def ready(**facts: Any) -> Ready:
    usual: dict[str, Any] = {
        "version": VERSION,
        "pid": 7,
        "hostname": "node",
        "python": "3.11.7",
        "executable": "/usr/bin/python3",
        "time": 1000.0,
        "cores": 8,
        "gpus": [],
        "tensorflow": "2.21.0",
    }
    return Ready(**{**usual, **facts})


def inspected(**facts: Any) -> Inspected:
    usual: dict[str, Any] = {
        "keras": "3.15.1",
        "gpus": [],
        "free_bytes": 80 << 30,
        "directory": "/work",
        "program_hash": "ab" * 32,
        "proxies": [],
    }
    return Inspected(**{**usual, **facts})


def tell(preflight: Preflight, node: str, *messages: Ready | Inspected | Dialled) -> None:
    """Passes the node's messages to the checks."""
    for message in messages:
        preflight.note(node, message, 0.0)


class Answered:
    """A Preflight whose nodes give good answers, except where a test changes them.

    `failures`: why a dial fails, by the node that dials and the host that it dials. `facts`, `looks`, `clocks`:
    differences from the usual answers, by node.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        failures: Mapping[tuple[str, str], str] | None = None,
        resolved: Mapping[tuple[str, str], list[str]] | None = None,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
        looks: Mapping[str, Mapping[str, Any]] | None = None,
        clocks: Mapping[str, float] | None = None,
        sees: Mapping[str, Sequence[str]] | None = None,
        order: Sequence[str] = (),
        source: str = "",
    ) -> None:
        self.spec = spec
        self.preflight = Preflight(spec, NONCE)
        nodes = order or [node.host for node in spec.nodes]
        marks = {node: self.preflight.make_inspect(node).mark for node in nodes}
        ports = {task: 20000 + task.index for _, task in spec.placements()}
        for node in nodes:
            tell(self.preflight, node, ready(**(facts or {}).get(node, {})))
            tell(self.preflight, node, inspected(**(looks or {}).get(node, {})))
        dials = self.preflight.make_dials(nodes, ports)
        for node in nodes:
            results = [
                DialResult(
                    target,
                    (resolved or {}).get((node, target.host), [target.host]),
                    (failures or {}).get((node, target.host), ""),
                    source,
                )
                for target in dials[node].targets
            ]
            seen = [marks[other] for other in (sees or {}).get(node, nodes)]
            self.preflight.note(node, Dialled(results, seen), (clocks or {}).get(node, 0.0))

    @property
    def findings(self) -> list[Finding]:
        return self.preflight.findings()

    @property
    def references(self) -> list[str]:
        return [finding.reference for finding in self.findings]

    def report(self, *events: Event | float) -> CheckReport:
        """The report, if the gang received the events after all nodes were prepared."""
        return make_check_report(self.spec, self.preflight, checked(self.spec, *events))


def checked(spec: ClusterSpec, *events: Event | float) -> AttemptState:
    """A gang that only checks, and is finished."""
    layout: dict[str, list[TaskId]] = {}
    for node, task in spec.placements():
        layout.setdefault(node.host, []).append(task)
    policy = checking(layout, only=True)
    state, _ = play(policy, *asked(policy), *(events or [Checked()]), *map(NodeEmpty, policy.nodes))
    assert state.phase is Phase.FINISHED
    return state


def checking(layout: Mapping[str, list[TaskId]], *, only: bool = False, syncs: Sequence[str] = ()) -> AttemptPolicy:
    return replace(make_policy(layout), checks=True, only_checks=only, syncs=frozenset(syncs))


def asked(policy: AttemptPolicy) -> list[Event]:
    """All events before the nodes dial each other."""
    events: list[Event] = [NodeReady(node) for node in policy.nodes]
    events += [NodeSynced(node, 1, 10) for node in sorted(policy.syncs)]
    events += [NodePrepared(node, ports_of(policy, node)) for node in policy.nodes]
    return [*events, *map(NodeInspected, policy.nodes)]
