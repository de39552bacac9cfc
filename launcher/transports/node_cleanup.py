"""Stops leftover processes on one node, of runs whose controller is gone."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.transports.base import AgentAddress, GoneError, LinkError
from launcher.transports.connector import Opening
from launcher.transports.payload import make_payload
from launcher.transports.streams import ask
from launcher.transports.targets import find_connector, name_python
from launcher.wording import count_of
from worker_entry.agent import cleanup
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Broken, Cleaned
from worker_entry.protocol.orders import UNPROVEN, VERSION, Clean

ANSWER_S = 60.0


@dataclass(frozen=True)
class CleanedNode:
    """The result for one node; `problem` is empty if the node could be reached."""

    node: str
    ended: int = 0
    left: tuple[int, ...] = ()
    problem: str = ""
    gone: bool = False
    """Whether the machine itself is gone, and all of its processes with it."""
    unproven: bool = False
    """Whether the node was reached, but an agent may still run where it cannot be seen."""

    @property
    def ok(self) -> bool:
        return not self.problem and not self.left

    def __str__(self) -> str:
        if self.problem:
            return f"{self.node}: not cleaned: {self.problem}"
        if self.left:
            return f"{self.node}: {self.ended} stopped; cannot be stopped: {', '.join(map(str, self.left))}"
        return f"{self.node}: {count_of(self.ended, 'process', 'processes')} stopped, 0 left"


def clean_node(
    spec: ClusterSpec,
    node: NodeSpec,
    run_ids: Sequence[str],
    agent: AgentAddress | None = None,
) -> CleanedNode:
    """Stops the processes that these runs, or their agent at this address, left on one node of the spec."""
    if node.is_local:
        # This machine's only agent is our child; closing its link has already waited for its exit.
        answer = cleanup.clean(run_ids) if agent is None else Cleaned(0, [])
        return CleanedNode(node.host, answer.ended, tuple(answer.left))
    folder, view = (agent.reattach_folder, agent.process_view) if agent is not None else (None, "")
    return _ask(spec, node, Clean(VERSION, list(run_ids), folder, process_view=view))


def end_warm(spec: ClusterSpec, node: NodeSpec) -> CleanedNode:
    """Ends the agents that wait for another run on another machine."""
    return _ask(spec, node, Clean(VERSION, [], warm=True))


def _ask(spec: ClusterSpec, node: NodeSpec, order: Clean) -> CleanedNode:
    try:
        stream = find_connector(spec, node).open(make_payload("clean"), name_python(spec, node), Opening())
        message = ask(stream, order, ANSWER_S)
    except GoneError:
        return CleanedNode(node.host, gone=True)
    except (LinkError, UsageError) as error:
        return CleanedNode(node.host, problem=str(error))
    if isinstance(message, Broken):
        unproven = message.problem.reference == UNPROVEN
        return CleanedNode(node.host, problem=message.problem.message, unproven=unproven)
    if not isinstance(message, Cleaned):
        return CleanedNode(node.host, problem=f"it answered {type(message).__name__}")
    return CleanedNode(node.host, message.ended, tuple(message.left))
