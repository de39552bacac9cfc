"""Finds all contradictions between the fields of a spec, each with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launcher.spec.parts import SlurmSpec
from launcher.spec.pods import PodsSpec
from launcher.spec.strategies import FRAMEWORKS, Framework, StrategyRules, find_role_problem
from launcher.tasks import TASK_TYPES, TRAINING_TYPES, TaskId
from launcher.wording import count_of
from worker_entry.protocol import environment

if TYPE_CHECKING:
    from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec

OWN_VARIABLES = (environment.TF_CONFIG, "TF_GRPC_REUSE_PORT", *environment.OF_TASKS)
"""Environment variables that distlaunch sets itself."""
KERAS_VARIABLES = tuple(f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"))
FRAMEWORK_VARIABLES: Mapping[Framework, tuple[str, ...]] = {
    "tensorflow": (),
    "torch": ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *KERAS_VARIABLES),
    "jax": (*environment.OF_JAX, *KERAS_VARIABLES),
}
"""Environment variables that distlaunch sets for each framework."""

TASKS_LIMIT = 100_000
"""The maximum number of tasks of a cluster; a larger number is a typing error."""

Path = tuple[str | int, ...]


def render_path(path: Path) -> str:
    """`("nodes", 1, "port")` → `nodes[1].port`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def find_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    """Yields the path of each contradiction, and a message."""
    total = sum(node.count(task_type) for node in spec.nodes for task_type in TASK_TYPES)
    if total > TASKS_LIMIT:
        yield ("nodes",), f"{total:,} tasks are more than a cluster can have; the limit is {TASKS_LIMIT:,}"
        return
    if spec.nodes:  # empty until their source has named them
        yield from _role_contradictions(spec)
    yield from _place_contradictions(spec)
    for index, node in enumerate(spec.nodes):
        yield from _gpu_contradictions(node, spec.rules, ("nodes", index))
    yield from _env_contradictions(spec)
    shared = spec.log_directory or spec.checkpoint_directory or spec.shares_files
    if spec.tensorboard and not shared:
        yield ("tensorboard",), "has no logs to show; name a `log_directory:` that all nodes share"
    workers = sum(node.count(task_type) for node in spec.nodes for task_type in spec.rules.computes)
    if spec.restart.min_workers > workers > 0:
        yield (
            ("restart", "min_workers"),
            f"the cluster has only {count_of(workers, 'worker')}; lower it",
        )
    if spec.isolation == "namespace" and len(spec.nodes) > 1:
        yield ("isolation",), "namespace works on one machine only; for several, choose tunnel"
    if spec.isolation == "tunnel" and spec.framework in FRAMEWORKS:
        name = FRAMEWORKS[spec.framework][0]
        yield ("isolation",), f"{name} opens ports that no tunnel forwards; remove it, or `framework: {spec.framework}`"
    if spec.isolation == "tunnel" and spec.communication == "nccl":
        yield ("communication",), "NCCL opens ports that no tunnel forwards; choose ring, or remove `isolation:`"
    if spec.framework in FRAMEWORKS and "strategy" in spec.model_fields_set:
        yield ("strategy",), f"applies only to TensorFlow; with `framework: {spec.framework}`, remove it"
    if spec.framework == "torch" and spec.runs_demo:
        yield ("framework",), "PyTorch has no demo; name a `program:`"
    if spec.communication != "auto" and (spec.strategy != "multi_worker_mirrored" or spec.framework in FRAMEWORKS):
        yield ("communication",), "applies only to multi_worker_mirrored; remove it"
    if spec.cross_device is not None and spec.strategy != "mirrored":
        yield ("cross_device",), "applies only to mirrored; remove it"
    if spec.cache is not None and spec.program.command is not None:
        yield ("cache",), "the compiler of a `command:` is unknown; name a script or a module, or remove it"
    if (
        spec.slurm != SlurmSpec()
        and spec.source != "slurm"
        and not any(node.connection == "slurm" for node in spec.nodes)
    ):
        yield ("slurm",), "applies only to `nodes: slurm`; remove it"
    if isinstance(spec.source, PodsSpec) and "connection" in spec.model_fields_set:
        yield ("connection",), "pods are reached by `kubectl exec`; remove it"
    if spec.keep_warm_s and isinstance(spec.source, PodsSpec):
        yield ("keep_warm_s",), "pods end with their run; remove it"
    if spec.keep_warm_s and (spec.preload is False or spec.program.command is not None):
        yield ("keep_warm_s",), "nothing is preloaded here, so there is nothing to keep warm; remove it"
    if spec.sync is not None and spec.working_directory is not None:
        yield ("working_directory",), "with `sync:`, the program runs in the synced folder; remove this"


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
                yield path, "a spare node gets the tasks of the node that it replaces; remove `tasks:`"
            continue
        for task_type in ("chief", "evaluator"):
            if totals[task_type] > 1 and node.tasks.get(task_type, 0):
                message = f"a cluster has at most one {task_type}, but this one has {totals[task_type]}; keep one"
                yield (*path, task_type), message
        if not sum(node.tasks.values()):
            yield path, "this node has no tasks; remove the node"


def _place_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    """Contradictions of hosts, addresses and ports: every task needs its own address, which the others can dial."""
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
            yield (*path, "host"), f"{node.host} is already nodes[{first}]; give that node all of the tasks"
            continue
        if node.is_local and node.connection is not None:
            yield (*path, "connection"), "`local` is this machine, which needs no connection; remove it"
        if node.address is not None and node.addresses is not None:
            yield (*path, "addresses"), "cannot be combined with `address:`; keep one of them"
        if node.is_local and node.address is None and node.addresses is None and len(spec.nodes) > 1:
            message = "other machines cannot dial `local`; add the `address:` at which they reach this machine"
            yield (*path, "host"), message
        first = addresses.setdefault(node.default_address, index)
        if first != index and None in (node.port, spec.nodes[first].port):
            field = "address" if node.address is not None else "addresses" if node.addresses is not None else "host"
            yield (
                (*path, field),
                f"nodes[{first}] has the same address {node.default_address}; give both nodes a `port:`",
            )
        if node.port is None:
            if len(tasks) > len(spec.ports):
                message = f"{count_of(len(spec.ports), 'port')} for {len(tasks)} tasks on {node.host}; widen the range"
                yield ("ports",), message
            continue
        if node.port + len(tasks) - 1 > 65535:
            yield (
                (*path, "port"),
                f"{count_of(len(tasks), 'task')} from port {node.port} on exceed 65535; choose a lower port",
            )
        for port, task in enumerate(tasks, node.port):
            owner = taken.setdefault((node.default_address, port), task)
            if owner != task:
                yield (*path, "port"), f"{port} is already used by {owner} on the same node; choose another port"
                break


def _gpu_contradictions(node: NodeSpec, rules: StrategyRules, path: Path) -> Iterator[tuple[Path, str]]:
    if node.gpus is None:
        return
    if len(set(node.gpus)) != len(node.gpus):
        yield (*path, "gpus"), "a GPU is listed twice; list each once"
    sharers = sum(node.tasks.get(task_type, 0) for task_type in rules.computes)
    wanted = (node.gpus_per_worker or 0) * sharers
    if wanted > len(node.gpus):
        message = f"{sharers} workers need {wanted} GPUs, but `gpus:` names {len(node.gpus)}; lower it"
        yield (*path, "gpus_per_worker"), message


def _env_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    places: list[tuple[Path, dict[str, str]]] = [(("env",), spec.env)]
    places += [(("nodes", index, "env"), node.env) for index, node in enumerate(spec.nodes)]
    for name in (*OWN_VARIABLES, *FRAMEWORK_VARIABLES[spec.framework]):
        for path, env in places:
            if name in env:
                yield (*path, name), "is set by distlaunch for each task; remove it"
        if name in spec.env_from:
            yield ("env_from", spec.env_from.index(name)), f"{name} is set by distlaunch for each task; remove it"
