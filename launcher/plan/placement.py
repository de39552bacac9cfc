"""Which nodes play: a spare takes the place of a node that was lost, or the others go on without it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic_core import ValidationError

from launcher.spec.models import ClusterSpec, NodeSpec
from launcher.wording import count_of


def without_spares(spec: ClusterSpec) -> ClusterSpec:
    """The spec without its spares."""
    return spec.changed(nodes=[node for node in spec.nodes if not node.spare])


def select_nodes(spec: ClusterSpec, lost: Collection[str] = ()) -> tuple[ClusterSpec, list[str]] | None:
    """The spec without spares and lost nodes, and what of that the user should know.

    A spare gets the tasks of the node whose place it takes, so that all tasks keep their indices. What is returned is
    as valid as a spec that the user writes: every role that its strategy needs is there.

    Args:
        spec: as the user wrote it.
        lost: the hosts that cannot be used any more.

    Returns:
        None if the nodes that are left are too few, or lack a role.
    """
    spares = [node for node in spec.nodes if node.spare and node.host not in lost]
    nodes: list[NodeSpec] = []
    notes = []
    for node in spec.nodes:
        if node.spare:
            continue
        if node.host not in lost:
            nodes.append(node)
        elif (spare := _find_spare(spec, node, spares)) is not None:
            spares = [other for other in spares if other.host != spare.host]
            nodes.append(spare)
            notes.append(f"{spare.host} takes the place of {node.host}")
        elif not spec.restart.min_workers:
            return None
        else:
            notes.append(f"going on without {node.host}")
    workers = _count_workers(spec, nodes)
    if workers < max(spec.restart.min_workers, 1):
        return None
    try:
        chosen = spec.changed(nodes=nodes)
    except ValidationError:
        return None
    if any(note.startswith("going on") for note in notes):
        notes.append(f"{count_of(workers, 'worker')} of {_count_workers(spec, spec.nodes)} are left")
    return chosen, notes


def _find_spare(spec: ClusterSpec, lost: NodeSpec, spares: Sequence[NodeSpec]) -> NodeSpec | None:
    """The first spare that can run the tasks of the lost node, with these tasks: its ports and GPUs suffice."""
    for spare in spares:
        instead = spare.changed(spare=False, tasks=lost.tasks)
        others = [node for node in spec.nodes if node.host != spare.host]
        try:
            spec.changed(nodes=[instead if node is lost else node for node in others])
        except ValidationError:
            continue
        return instead
    return None


def _count_workers(spec: ClusterSpec, nodes: Sequence[NodeSpec]) -> int:
    return sum(node.count(task_type) for node in nodes for task_type in spec.rules.computes)
