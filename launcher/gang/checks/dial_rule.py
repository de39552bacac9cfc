"""Which nodes dial which before a start, pure: all pairs of few nodes, and enough of many."""

from __future__ import annotations

from collections.abc import Sequence

ALL_PAIRS = 64
"""Up to this many nodes, each dials all."""


def choose_dials(nodes: Sequence[str], leader: str | None) -> dict[str, list[str]]:
    """The nodes that each node dials; with few nodes, also itself.

    Among more than ALL_PAIRS nodes, the leader and all others dial each other, because all of TensorFlow's tasks
    connect to the leader's; and each node dials those that are 1, 2, 4, 8, … places behind it, and is dialled by as
    many: neighbours, which the ring of an all-reduce connects, and nodes far away, behind other switches. So 1,000
    nodes dial 12,000 times and not a million times.

    Args:
        nodes: in the order of the spec.
        leader: the node of the task to which all others connect; None if there is no such task.
    """
    if len(nodes) <= ALL_PAIRS:
        return {node: [*nodes] for node in nodes}
    led = [leader] if leader is not None and leader in nodes else []
    chosen: dict[str, list[str]] = {}
    for place, node in enumerate(nodes):
        behind = [nodes[(place + step) % len(nodes)] for step in _steps(len(nodes))]
        wanted = nodes if node == leader else [*led, *behind]
        chosen[node] = [other for other in dict.fromkeys(wanted) if other != node]
    return chosen


def count_partners(nodes: int) -> int:
    """How many nodes other than the leader dial a node, if not all do."""
    return len(_steps(nodes))


def _steps(nodes: int) -> list[int]:
    return [1 << power for power in range((nodes - 1).bit_length())]
