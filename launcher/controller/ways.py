"""The ways to the nodes of a run, while their list may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from launcher.controller.context import RunContext
from launcher.controller.recovery import Recovered
from launcher.plan.planner import Planner
from launcher.plan.rendering import render_spec
from launcher.rundir.directory import RunDir
from launcher.sources.node_list import ask_nodes
from launcher.sources.pod_nodes import ask_pods
from launcher.sources.pods import RunPods
from launcher.spec.models import ClusterSpec
from launcher.transports.base import AgentAddress, Transport
from launcher.transports.node_cleanup import clean_node
from launcher.transports.targets import Targets, find_addresses, find_targets, make_transport


def make_transports(spec: ClusterSpec, targets: Targets, files: RunDir, run_id: str) -> dict[str, Transport]:
    """The ways to all nodes of a spec, by host."""
    return {node.host: make_transport(spec, node, targets[node.host], files, run_id) for node in spec.nodes}


@dataclass
class Recovery:
    """A function that stops a run's leftover processes on a lost node (`recovery.Recover`)."""

    spec: ClusterSpec
    """The spec of the last attempt."""
    run_id: str

    def __call__(self, host: str, agent: AgentAddress) -> Recovered:
        node = next(node for node in self.spec.nodes if node.host == host)
        cleaned = clean_node(self.spec, node, [self.run_id], agent)
        if cleaned.unproven:
            return Recovered.UNPROVEN
        return Recovered.YES if cleaned.good and not cleaned.gone else Recovered.NO


@dataclass(frozen=True)
class Relisting:
    """A function that asks the spec's source for the current nodes, and prepares the ways to them."""

    context: RunContext
    recovery: Recovery
    pods: RunPods | None = None

    def __call__(self, planner: Planner, is_wanted: Callable[[], bool]) -> Planner:
        if self.pods is None:
            spec = ask_nodes(planner.spec, is_wanted)
        else:
            spec = ask_pods(planner.spec, self.pods, is_wanted, self.context.console.note)
        if spec.nodes == planner.spec.nodes:
            return planner
        targets, files = find_targets(spec), self.context.files
        self.context.links.add(make_transports(spec, targets, files, self.context.run_id))
        self.recovery.spec = spec
        files.write_text(files.spec, render_spec(spec))
        return replace(planner, spec=spec, reached=find_addresses(spec, targets))
