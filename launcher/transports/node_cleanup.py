"""Stops what is left on one node of runs whose controller is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec, NodeSpec
from launcher.transports.base import LinkError
from launcher.transports.targets import find_target
from launcher.wording import count_of
from worker_entry.agent import cleanup
from worker_entry.protocol.messages import Cleaned
from worker_entry.protocol.orders import VERSION, Clean

ANSWER_S = 60.0


@dataclass(frozen=True)
class CleanedNode:
    """What came of a node; `problem` is empty if it could be asked."""

    node: str
    ended: int = 0
    left: tuple[int, ...] = ()
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and not self.left

    def __str__(self) -> str:
        if self.problem:
            return f"{self.node}: cannot be asked: {self.problem}"
        if self.left:
            return f"{self.node}: {self.ended} ended; cannot be ended: {', '.join(map(str, self.left))}"
        return f"{self.node}: {count_of(self.ended, 'process', 'processes')} ended, 0 left"


def clean_node(
    spec: ClusterSpec, node: NodeSpec, run_ids: Sequence[str], reattach_folder: str | None = None
) -> CleanedNode:
    """Cleans one node of the spec of what is left there of these runs, or of the agent of this meeting place."""
    if node.is_local:
        # The one agent here is a child of ours, and was seen to its end when its link was closed.
        answer = cleanup.clean(run_ids) if reattach_folder is None else Cleaned(0, [])
        return CleanedNode(node.host, answer.ended, tuple(answer.left))
    from launcher.transports.ssh.transport import open_stream
    from launcher.transports.streams import ask

    try:
        stream = open_stream(find_target(spec, node), node.python or "python3", "clean")
        message = ask(stream, Clean(VERSION, list(run_ids), reattach_folder), ANSWER_S)
    except (LinkError, UsageError) as error:
        return CleanedNode(node.host, problem=str(error))
    if not isinstance(message, Cleaned):
        return CleanedNode(node.host, problem=f"it answered {type(message).__name__}")
    return CleanedNode(node.host, message.ended, tuple(message.left))
