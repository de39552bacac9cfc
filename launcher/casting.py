"""Which nodes play: a spare takes the place of a node that was lost, or the others go on without it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from launcher.spec import ClusterSpec
from launcher.tasks import TRAINING_TYPES


def at_first(spec: ClusterSpec) -> ClusterSpec:
    """The spec without its spares."""
    return spec.model_copy(update={"nodes": [node for node in spec.nodes if not node.spare]})


def cast(spec: ClusterSpec, lost: Collection[str] = ()) -> tuple[ClusterSpec, list[str]] | None:
    """The spec without spares and lost nodes, and what of that the user should know.

    A spare gets the tasks of the node whose place it takes, so that all tasks keep their indices.

    Args:
        spec: as the user wrote it.
        lost: the hosts that cannot be used any more.

    Returns:
        None if the nodes that are left are too few.
    """
    spares = [node for node in spec.nodes if node.spare and node.host not in lost]
    nodes, notes = [], []
    for node in spec.nodes:
        if node.spare:
            continue
        if node.host not in lost:
            nodes.append(node)
        elif spares:
            spare = spares.pop(0)
            nodes.append(spare.model_copy(update={"spare": False, "tasks": node.tasks}))
            notes.append(f"{spare.host} takes the place of {node.host}")
        elif not spec.restart.min_workers:
            return None
        else:
            notes.append(f"going on without {node.host}")
    trainers = sum(node.tasks.get(task_type, 0) for node in nodes for task_type in TRAINING_TYPES)
    if trainers < max(spec.restart.min_workers, 1):
        return None
    if any(note.startswith("going on") for note in notes):
        notes.append(f"{trainers} worker{'s'[: trainers > 1]} of {_count_trainers(spec)} are left")
    return spec.model_copy(update={"nodes": nodes}), notes


def _count_trainers(spec: ClusterSpec) -> int:
    return sum(node.count(task_type) for node in spec.nodes for task_type in TRAINING_TYPES)
