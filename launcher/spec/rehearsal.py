"""Changes a spec so that containers on one machine stand in for the machines that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.spec.explain import explain_option, refuse_options
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.spec.parts import SlurmSpec, SshSpec
from launcher.tasks import TRAINING_TYPES

RESERVED = ("controller", "keys")
"""Services of every Compose file that distlaunch writes; no node can have these names."""

_MACHINE_FIELDS = {
    "address": None,
    "addresses": None,
    "gpus": None,
    "gpus_per_worker": None,
    "python": None,
    "ssh": SshSpec(),
    "connection": None,
}
"""Fields of a node that apply only to the real machine, and their values in a container."""


def rehearse(spec: ClusterSpec, count: int, option: str = "--rehearsal") -> ClusterSpec:
    """The spec with `count` containers in place of its nodes; see `_choose` for fewer or more containers.

    Args:
        spec: the spec for real machines.
        count: the number of containers.
        option: the option with which the user asked for them.

    Raises:
        UsageError: the spec is not valid with this many nodes: for example, no task would train, or a role is missing.
    """
    chosen = _choose(spec, count)
    if not any(node.count(task_type) for node in chosen for task_type in TRAINING_TYPES):
        raise UsageError(
            f"no task trains on the first {count} of the spec's {len(spec.nodes)} nodes", hint="use more nodes"
        )
    try:
        nodes = [node.changed(**_MACHINE_FIELDS, host=name) for node, name in zip(chosen, _names(chosen), strict=True)]
        workers = sum(node.count(task_type) for node in nodes for task_type in spec.rules.computes)
        restart = spec.restart.changed(min_workers=min(spec.restart.min_workers, workers))
        return spec.changed(
            nodes=nodes,
            python=None,
            connection="paramiko",
            ssh=SshSpec(),
            host_keys="strict",
            restart=restart,
            slurm=SlurmSpec(),
        )
    except ValidationError as error:
        raise refuse_options(explain_option(f"{option} {count}", error)) from None


def _choose(spec: ClusterSpec, count: int) -> list[NodeSpec]:
    """The first `count` nodes of the spec; if it has fewer, copies of the last node that trains are added."""
    trains = [node for node in spec.nodes if any(node.count(task_type) for task_type in TRAINING_TYPES)]
    workers = max(trains[-1].count("worker"), 1)
    more = trains[-1].changed(tasks={"worker": workers}, port=None)
    return [*spec.nodes, *[more] * (count - len(spec.nodes))][:count]


def _names(nodes: list[NodeSpec]) -> Iterator[str]:
    """Yields each node's container name: its machine's name, or one like `node-3` where that is not possible."""
    used: set[str] = {*RESERVED}
    for number, node in enumerate(nodes, 1):
        name = node.host.rpartition("@")[2].lower()
        can_be = re.fullmatch(r"(?=.*[a-z])[a-z0-9][a-z0-9_.-]*", name) is not None
        if not can_be or node.is_local or name in used:
            name = f"node-{number}"
        used.add(name)
        yield name
