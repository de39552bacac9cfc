"""The layout of a cluster: the node, address and port of every task, and the settings that name the other tasks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from launcher.plan.framework_env import make_framework_envs
from launcher.plan.tf_config import TfConfig, check_lengths, format_address, make_tf_configs
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.tasks import TENSORBOARD, TaskId, find_leader
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All tasks with their nodes, ports and addresses.

    `tasks`: the tasks of each host, in order. `chief`: the host of the task that acts as chief, if any. `addresses`:
    `host:port`, as the tasks see it. `routes`: with a tunnel, the hosts that these addresses stand for.
    `framework_envs`: the variables of a framework other than TensorFlow.
    """

    tasks: Mapping[str, Sequence[TaskId]]
    chief: str | None
    ports: Mapping[TaskId, int]
    addresses: Mapping[TaskId, str]
    configs: Mapping[TaskId, TfConfig | None]
    framework_envs: Mapping[TaskId, Mapping[str, str]]
    routes: Mapping[str, str]

    @property
    def size(self) -> int:
        """The number of tasks in the cluster."""
        return len(self.addresses)


def lay_out(spec: ClusterSpec, ports: Mapping[TaskId, int] | None, chosen_addresses: Mapping[str, str]) -> Layout:
    """Lays out all tasks.

    Args:
        spec: the user's spec.
        ports: the ports that the nodes hold; by default, the ports that they take if all are free.
        chosen_addresses: the addresses that the checks chose, by host; for other hosts, the first candidates count.
    """
    placements = list(spec.placements())
    leader = find_leader(task for _, task in placements)
    chief = next((node for node, task in placements if task == leader), None)
    board = [(chief, TENSORBOARD)] if spec.tensorboard and chief is not None else []
    ports = ports or dict(_expected_ports(spec, [*placements, *board]))
    hosts = {node.host: chosen_addresses.get(node.host, node.default_address) for node in spec.nodes}
    routes = dict(zip(_loopback_addresses(), hosts.values(), strict=False)) if spec.isolation == "tunnel" else {}
    inside = dict(zip(hosts, routes or hosts.values(), strict=True))
    addresses = {task: format_address(inside[node.host], ports[task]) for node, task in placements}
    configs = make_tf_configs(addresses)
    if spec.framework != "tensorflow":
        configs = dict.fromkeys(configs)
    check_lengths(configs)
    tasks: dict[str, list[TaskId]] = {node.host: [] for node in spec.nodes}
    for node, task in placements:
        tasks[node.host].append(task)
    return Layout(
        tasks=tasks,
        chief=chief.host if chief is not None else None,
        ports=ports,
        addresses=addresses,
        configs=configs,
        framework_envs=make_framework_envs(spec.framework, [(node.host, task) for node, task in placements], addresses),
        routes=routes,
    )


def _loopback_addresses() -> Iterator[str]:
    """An address for each node of a cluster whose nodes have separate networks: 127.1.0.1, 127.1.0.2, …"""
    return map(str, ipaddress.ip_network("127.1.0.0/16").hosts())


def _expected_ports(spec: ClusterSpec, placements: Sequence[tuple[NodeSpec, TaskId]]) -> Iterator[tuple[TaskId, int]]:
    following = {node.host: node.port or spec.ports.first for node in spec.nodes}
    for node, task in placements:
        yield task, following[node.host]
        following[node.host] += 1
