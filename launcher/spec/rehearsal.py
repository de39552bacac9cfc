"""A spec as it runs on containers of one machine, before it meets the machines that it names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.spec.mistakes import explain_option, refuse_options
from launcher.spec.models import ClusterSpec, NodeSpec
from launcher.spec.parts import SshSpec
from launcher.tasks import TRAINING_TYPES

RESERVED = ("controller", "keys")
"""Services of every Compose file of ours, whose names no node can have."""

_OF_THE_MACHINES = {
    "address": None,
    "addresses": None,
    "gpus": None,
    "gpus_per_worker": None,
    "python": None,
    "ssh": SshSpec(),
}
"""What a node's spec says of the real machine only."""


def rehearse(spec: ClusterSpec, count: int, option: str = "--rehearsal") -> ClusterSpec:
    """The spec on `count` containers, which stand for its nodes; see `_choose` for fewer or more of them.

    Args:
        spec: for real machines.
        count: how many containers.
        option: by which the user has asked for so many.

    Raises:
        UsageError: there is no valid spec of so many nodes: none would train, say, or a role is missing.
    """
    chosen = _choose(spec, count)
    if not any(node.count(task_type) for node in chosen for task_type in TRAINING_TYPES):
        raise UsageError(f"no task trains on the first {count} of the spec's {len(spec.nodes)} nodes", hint="use more")
    try:
        nodes = [node.changed(**_OF_THE_MACHINES, host=name) for node, name in zip(chosen, _names(chosen), strict=True)]
        workers = sum(node.count(task_type) for node in nodes for task_type in spec.rules.computes)
        restart = spec.restart.changed(min_workers=min(spec.restart.min_workers, workers))
        return spec.changed(nodes=nodes, ssh=SshSpec(), host_keys="strict", restart=restart)
    except ValidationError as error:
        raise refuse_options(explain_option(f"{option} {count}", error)) from None


def _choose(spec: ClusterSpec, count: int) -> list[NodeSpec]:
    """The first nodes of the spec; behind its last one, as many like the last that trains as are wanted."""
    trains = [node for node in spec.nodes if any(node.count(task_type) for task_type in TRAINING_TYPES)]
    workers = max(trains[-1].count("worker"), 1)
    more = trains[-1].changed(tasks={"worker": workers}, port=None)
    return [*spec.nodes, *[more] * (count - len(spec.nodes))][:count]


def _names(nodes: list[NodeSpec]) -> Iterator[str]:
    """What each node is called among containers: its machine's name, or `node-3` where that cannot be."""
    used: set[str] = {*RESERVED}
    for number, node in enumerate(nodes, 1):
        name = node.host.rpartition("@")[2].lower()
        can_be = re.fullmatch(r"(?=.*[a-z])[a-z0-9][a-z0-9_.-]*", name) is not None
        if not can_be or node.is_local or name in used:
            name = f"node-{number}"
        used.add(name)
        yield name
