"""What a spec's fields say against each other: each contradiction with its place, all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.spec.strategies import (
    StrategyRules,
    find_role_problem,
)
from launcher.tasks import TASK_TYPES, TRAINING_TYPES, TaskId
from launcher.wording import count_of
from worker_entry.protocol import environment

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec, NodeSpec

OWN_VARIABLES = (environment.TF_CONFIG, "TF_GRPC_REUSE_PORT", *environment.OF_TASKS)
"""Environment variables that distlaunch sets itself."""
TORCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Those that it sets for PyTorch."""

TASKS_LIMIT = 100_000
"""Tasks of a cluster; more is a slip of the pen."""


Path = tuple[str | int, ...]


def render_path(path: Path) -> str:
    """`("nodes", 1, "port")` → `nodes[1].port`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def find_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    total = sum(node.count(task_type) for node in spec.nodes for task_type in TASK_TYPES)
    if total > TASKS_LIMIT:
        yield ("nodes",), f"{total:,} tasks are more than a cluster can have; the limit is {TASKS_LIMIT:,}"
        return
    yield from _role_contradictions(spec)
    yield from _place_contradictions(spec)
    for index, node in enumerate(spec.nodes):
        yield from _gpu_contradictions(node, spec.rules, ("nodes", index))
    yield from _env_contradictions(spec)
    shared = spec.log_directory or spec.checkpoint_directory or spec.is_local
    if spec.tensorboard and not shared:
        yield ("tensorboard",), "has nothing to show here; name a `log_directory:` that all nodes share"
    workers = sum(node.count(task_type) for node in spec.nodes for task_type in spec.rules.computes)
    if spec.restart.min_workers > workers > 0:
        yield (
            ("restart", "min_workers"),
            f"the cluster has {count_of(workers, 'worker')}; name no more than that",
        )
    if spec.framework == "torch" and "strategy" in spec.model_fields_set:
        yield ("strategy",), "is of TensorFlow; leave it out with `framework: torch`"
    if spec.communication != "auto" and spec.strategy != "multi_worker_mirrored":
        yield ("communication",), f"is of multi_worker_mirrored; {spec.strategy} has none, leave it out"
    if spec.cross_device is not None and spec.strategy != "mirrored":
        yield ("cross_device",), f"is of mirrored; {spec.strategy} has none, leave it out"
    if spec.sync is not None and spec.working_directory is not None:
        yield ("working_directory",), "with `sync:` the program runs in the folder that is sent; leave this out"


def _role_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    totals = {task_type: sum(n.count(task_type) for n in spec.nodes) for task_type in TASK_TYPES}
    if not any(totals[task_type] for task_type in TRAINING_TYPES):
        yield ("nodes",), "no task trains; give at least one node `tasks: {worker: 1}`"
    elif (problem := find_role_problem(spec.strategy, totals, spec.framework)) is not None:
        wrong, message = problem
        place: Path = ("strategy",)
        if wrong is not None:
            first = next(index for index, node in enumerate(spec.nodes) if node.count(wrong))
            place = ("nodes", first, "tasks", wrong)
        yield place, message
    for index, node in enumerate(spec.nodes):
        path = ("nodes", index, "tasks")
        if node.spare:
            if "tasks" in node.model_fields_set:
                yield path, "a spare node gets the tasks of the node whose place it takes; leave `tasks:` out"
            continue
        for task_type in ("chief", "evaluator"):
            if totals[task_type] > 1 and node.tasks.get(task_type, 0):
                message = f"a cluster has at most one {task_type}, this one has {totals[task_type]}; keep one"
                yield (*path, task_type), message
        if not sum(node.tasks.values()):
            yield path, "this node has no task; leave the node out"


def _place_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    """Hosts, addresses and ports: every task needs an address of its own that the others can dial."""
    tasks_of: dict[int, list[TaskId]] = {id(node): [] for node in spec.nodes}
    for node, task in spec.placements():
        tasks_of[id(node)].append(task)
    hosts: dict[str, int] = {}
    addresses: dict[str, int] = {}
    taken: dict[tuple[str, int], TaskId] = {}
    for index, node in enumerate(spec.nodes):
        path, tasks = ("nodes", index), tasks_of[id(node)]
        first = hosts.setdefault(node.host, index)
        if first != index:
            yield (*path, "host"), f"{node.host} is nodes[{first}] already; give that node all of its tasks"
            continue
        if node.address is not None and node.addresses is not None:
            yield (*path, "addresses"), "there is an `address:` already; keep one of the two"
        if node.is_local and node.address is None and node.addresses is None and len(spec.nodes) > 1:
            message = "other machines cannot dial `local`; add `address:`, by which they reach this machine"
            yield (*path, "host"), message
        first = addresses.setdefault(node.dialled, index)
        if first != index and None in (node.port, spec.nodes[first].port):
            field = "address" if node.address is not None else "addresses" if node.addresses is not None else "host"
            yield (*path, field), f"nodes[{first}] has the address {node.dialled}, too; give both nodes a `port:`"
        if node.port is None:
            if len(tasks) > len(spec.ports):
                message = f"{len(spec.ports)} are too few for the {len(tasks)} tasks of {node.host}; widen the range"
                yield ("ports",), message
            continue
        if node.port + len(tasks) - 1 > 65535:
            yield (*path, "port"), f"{len(tasks)} tasks from port {node.port} on go beyond 65535; start lower"
        for port, task in enumerate(tasks, node.port):
            owner = taken.setdefault((node.dialled, port), task)
            if owner != task:
                yield (*path, "port"), f"{port} is already used by {owner} on the same node; choose another port"
                break


def _gpu_contradictions(node: NodeSpec, rules: StrategyRules, path: Path) -> Iterator[tuple[Path, str]]:
    if node.gpus is None:
        return
    if len(set(node.gpus)) != len(node.gpus):
        yield (*path, "gpus"), "a GPU is named twice; name each once"
    sharers = sum(node.tasks.get(task_type, 0) for task_type in rules.computes)
    wanted = (node.gpus_per_worker or 0) * sharers
    if wanted > len(node.gpus):
        message = f"{sharers} workers would need {wanted} GPUs, `gpus:` names {len(node.gpus)}; lower it"
        yield (*path, "gpus_per_worker"), message


def _env_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    places: list[tuple[Path, dict[str, str]]] = [(("env",), spec.env)]
    places += [(("nodes", index, "env"), node.env) for index, node in enumerate(spec.nodes)]
    for name in OWN_VARIABLES if spec.framework == "tensorflow" else (*OWN_VARIABLES, *TORCH_VARIABLES):
        for path, env in places:
            if name in env:
                yield (*path, name), "is set by distlaunch for each task; leave it out"
        if name in spec.env_from:
            yield ("env_from", spec.env_from.index(name)), f"{name} is set by distlaunch for each task; leave it out"
