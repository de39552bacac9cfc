"""Selects the nodes of an attempt: a spare replaces a lost node, or the others continue without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic_core import ValidationError

from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.wording import count_of


def without_spares(spec: ClusterSpec) -> ClusterSpec:
    """The spec without its spares."""
    return spec.changed(nodes=[node for node in spec.nodes if not node.spare])


def select_nodes(spec: ClusterSpec, lost: Collection[str] = ()) -> tuple[ClusterSpec, list[str]] | None:
    """Returns the spec without spares and lost nodes, and notes about the change for the user.

    A spare gets the tasks of the node that it replaces, so that all tasks keep their indices. The result is a
    valid spec: it has every role that its strategy needs.

    Args:
        spec: the spec as the user wrote it.
        lost: the hosts that can no longer be used.

    Returns:
        None if too few nodes are left, or a role is missing.
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
            notes.append(f"continuing without {node.host}")
    workers = _count_workers(spec, nodes)
    if workers < max(spec.restart.min_workers, 1):
        return None
    try:
        chosen = spec.changed(nodes=nodes)
    except ValidationError:
        return None
    if any(note.startswith("continuing") for note in notes):
        before = count_of(_count_workers(spec, spec.nodes), "worker")
        notes.append(f"{workers} of {before} {'is' if workers == 1 else 'are'} left")
    return chosen, notes


def _find_spare(spec: ClusterSpec, lost: NodeSpec, spares: Sequence[NodeSpec]) -> NodeSpec | None:
    """The first spare whose ports and GPUs suffice for the lost node's tasks, as a node with these tasks."""
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
