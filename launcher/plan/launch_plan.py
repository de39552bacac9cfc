"""From a spec to what every task gets: node, address, port, GPUs, environment, TF_CONFIG.

Ports may change between the plan and the run: a node's agent takes ports that are free there, and `make_plan` is called
again with these.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.plan.resources import NO_GPU, NodeFacts, share_resources
from launcher.plan.tf_config import TfConfig, format_address, make_tf_configs
from launcher.plan.torch_env import make_torch_envs
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import LOOPBACK, NodeSpec
from launcher.spec.redaction import REDACTED, is_secret
from launcher.spec.strategies import RULES, StrategyRules
from launcher.tasks import TENSORBOARD, AuxiliaryType, TaskId, TaskType, find_leader
from worker_entry.protocol import environment
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program, TaskRequest

SERVER_MODULE = "worker_entry.task.server"
"""The program of the tasks that serve."""


@dataclass(frozen=True)
class TaskPlan:
    """One task as it will be started.

    `env` is added to the node's own environment; the values of the names in `secrets` are never shown. `port` is held
    for the task even if the task never opens it. `directory` is the task's working directory.
    """

    task: TaskId
    node: str
    directory: str
    python: str
    address: str
    port: int
    explicit_port: bool
    program: Program = field(repr=False)
    tf_config: TfConfig | None
    env: Mapping[str, str] = field(repr=False)
    secrets: frozenset[str]
    patch_keras: bool
    progress: bool = True
    collective: bool = True
    """Whether the task meets the others in every step, so that all wait for each other."""

    opens_port: bool = False
    """Whether the framework starts a server on the port."""
    reuse_address: bool = False
    """Whether the program binds its port with SO_REUSEADDR."""
    keep_own_tf_config: bool = False
    """Whether a TF_CONFIG that the program sets takes effect."""
    other_addresses: tuple[str, ...] = ()
    """The other candidates, if the checks have not chosen yet."""

    @property
    def request(self) -> TaskRequest:
        """What the task's node has to prepare."""
        port = self.port if self.explicit_port else 0
        return TaskRequest(str(self.task), self.program, port, reuse_address=self.reuse_address)

    def shown_env(self) -> dict[str, str]:
        """The environment, with its secrets redacted."""
        return {name: REDACTED if name in self.secrets else value for name, value in self.env.items()}


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started where. `directory` is the working directory, except on nodes that it is sent to."""

    name: str
    strategy: str
    directory: str
    tasks: tuple[TaskPlan, ...]
    rules: StrategyRules = RULES["multi_worker_mirrored"]
    warnings: tuple[str, ...] = ()
    preload: tuple[str, ...] | None = None
    """The modules that each node imports ahead, besides TensorFlow; None: a node imports nothing ahead."""
    routes: Mapping[str, str] = field(default_factory=dict)
    """With a tunnel, by address in TF_CONFIG: the host that it stands for."""
    unasked: tuple[str, ...] = ()
    """The nodes that were not asked yet for their cores and GPUs, if others were."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.node for task in self.tasks))


def make_plan(
    spec: ClusterSpec,
    *,
    directory: str,
    environ: Mapping[str, str],
    python: str,
    facts: Mapping[str, NodeFacts] | None = None,
    ports: Mapping[TaskId, int] | None = None,
    chosen_addresses: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Makes the plan.

    Args:
        spec: what the user wants.
        directory: the working directory, if the spec names none.
        environ: the source of the values of `env_from`.
        python: the interpreter of local nodes whose spec names none; remote nodes use `python3`.
        facts: what is known of the nodes, by host; cores and GPUs of other nodes are not shared out.
        ports: the ports that the nodes have taken; by default, the ports that they take if all are free.
        chosen_addresses: the addresses that the checks chose, by host; by default, the first candidates.

    Raises:
        UsageError: a node lacks what the spec asks for.
    """
    placements = list(spec.placements())
    board = [(_find_chief(placements), TENSORBOARD)] if spec.tensorboard else []
    ports = ports or dict(_expected_ports(spec, [*placements, *board]))
    chosen = chosen_addresses or {}
    hosts = {node.host: chosen.get(node.host, node.default_address) for node in spec.nodes}
    routes = dict(zip(_loopback_addresses(), hosts.values(), strict=False)) if spec.isolation == "tunnel" else {}
    inside = dict(zip(hosts, routes or hosts.values(), strict=True))
    addresses = {task: format_address(inside[node.host], ports[task]) for node, task in placements}
    rules = spec.rules
    configs = make_tf_configs(addresses)
    torch_envs: dict[TaskId, Mapping[str, str]] = {}
    if spec.framework == "torch":
        node, first = placements[0]
        master = hosts[node.host], ports[first]
        torch_envs = make_torch_envs([(node.host, task) for node, task in placements], master)
        configs = dict.fromkeys(configs)
    shares = {}
    warnings: list[str] = []
    for node in spec.nodes:
        tasks = [task for owner, task in placements if owner is node]
        shares.update(share_resources(node, tasks, rules, (facts or {}).get(node.host), warnings))
    if routes and any(known.gpus for known in (facts or {}).values()) and rules.collective:
        warnings.append("NCCL does not go through the tunnel: train with CommunicationImplementation.RING")
    secrets = {name: environ.get(name, "") for name in spec.env_from}
    plans = []
    for node, task in placements:
        own = own_env(spec, task, configs[task])
        env = {**own, **torch_envs.get(task, {}), **shares[task], **spec.env, **node.env, **secrets}
        plans.append(
            TaskPlan(
                task=task,
                node=node.host,
                directory=_directory(spec, node, directory),
                python=node.find_python(python),
                address=addresses[task].rpartition(":")[0],
                port=ports[task],
                explicit_port=node.port is not None,
                program=program_of(spec, task.type),
                tf_config=configs[task],
                env=env,
                secrets=frozenset([*secrets, *(name for name, value in env.items() if is_secret(name, value))]),
                patch_keras=spec.keras.patch and rules.patches_keras and task.type not in rules.serves,
                progress=spec.progress and task.type not in rules.serves,
                collective=rules.collective,
                opens_port=_opens_port(spec, task, configs[task], len(placements)),
                reuse_address=spec.framework == "torch",
                keep_own_tf_config=spec.keep_own_tf_config,
                other_addresses=() if node.host in chosen else tuple(node.candidates[1:]),
            )
        )
    for node, task in board:
        plans.append(_plan_board(spec, node, ports[task], _directory(spec, node, directory), python))
    return LaunchPlan(
        name=spec.name,
        strategy=spec.strategy if spec.framework == "tensorflow" else spec.framework,
        rules=rules,
        directory=_directory(spec, None, directory),
        tasks=tuple(plans),
        warnings=tuple(warnings),
        preload=_preloaded(spec),
        routes=routes,
        unasked=tuple(node.host for node in spec.nodes if facts and node.host not in facts),
    )


def _loopback_addresses() -> Iterator[str]:
    """One for each node of a cluster whose tasks live in networks of their own: 127.1.0.1, 127.1.0.2, …"""
    return map(str, ipaddress.ip_network("127.1.0.0/16").hosts())


def _find_chief(placements: Sequence[tuple[NodeSpec, TaskId]]) -> NodeSpec:
    leader = find_leader(task for _, task in placements)
    return next(node for node, task in placements if task == leader)


def _plan_board(spec: ClusterSpec, node: NodeSpec, port: int, directory: str, python: str) -> TaskPlan:
    """TensorBoard, on the loopback address only: it authenticates nobody."""
    words = ["--logdir", spec.logs or "", "--host", LOOPBACK, "--port", str(port), "--reload_interval", "5"]
    return TaskPlan(
        task=TENSORBOARD,
        node=node.host,
        directory=directory,
        python=node.find_python(python),
        address=LOOPBACK,
        port=port,
        explicit_port=False,
        program=Program("module", "tensorboard.main", words),
        tf_config=None,
        env={environment.TASK: str(TENSORBOARD), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": NO_GPU},
        secrets=frozenset(),
        patch_keras=False,
        progress=False,
        collective=False,
        reuse_address=True,
    )


def _preloaded(spec: ClusterSpec) -> tuple[str, ...] | None:
    if spec.program.command is not None or spec.preload is False:
        return None
    return () if spec.preload is True else tuple(spec.preload)


def make_preload(plan: LaunchPlan, node: str, *, keep: bool) -> Preload | None:
    """What a node has to import before it can fork its tasks; None: nothing.

    Args:
        plan: made with the node's facts.
        node: its host.
        keep: whether another attempt may follow, or a task may restart individually.
    """
    tasks = [task for task in plan.tasks if task.node == node and not task.task.is_auxiliary]
    if plan.preload is None or not tasks:
        return None
    common = set.intersection(*(set(task.env.items()) for task in tasks))
    return Preload(tasks[0].program, dict(common), [environment.TF_CONFIG], list(plan.preload), keep)


def _directory(spec: ClusterSpec, node: NodeSpec | None, default: str) -> str:
    if spec.sync is None:
        return spec.working_directory or default
    return str(Path(default, spec.sync.path)) if node is None or node.is_local else spec.sync.to


def _expected_ports(spec: ClusterSpec, placements: Sequence[tuple[NodeSpec, TaskId]]) -> Iterator[tuple[TaskId, int]]:
    following = {node.host: node.port or spec.ports.first for node in spec.nodes}
    for node, task in placements:
        yield task, following[node.host]
        following[node.host] += 1


def program_of(spec: ClusterSpec, task_type: TaskType | AuxiliaryType | None = None) -> Program:
    """What tasks of this type run; without a type, the program that the user wrote."""
    if task_type in spec.rules.serves:
        return Program("module", SERVER_MODULE)
    program = spec.program
    if program.command is not None:
        return Program("command", program.command[0], list(program.command[1:]))
    if program.module is not None:
        return Program("module", program.module, list(program.args))
    assert program.script is not None
    return Program("script", program.script, list(program.args))


def own_env(spec: ClusterSpec, task: TaskId, config: TfConfig | None) -> dict[str, str]:
    """The variables of a task that follow from the spec's fields other than `env`."""
    env = {
        environment.TASK: str(task),
        # Output reaches the log at once, even if the task is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if spec.framework == "tensorflow":
        env[environment.STRATEGY] = spec.strategy
        # The log gets all of TensorFlow's messages; the console folds them.
        env["TF_CPP_MIN_LOG_LEVEL"] = "0"
    if spec.devices is not None:
        env[environment.DEVICES] = str(spec.devices)
    if spec.communication != "auto" or spec.isolation == "tunnel":  # NCCL has connections of its own
        env[environment.COMMUNICATION] = "ring" if spec.communication == "auto" else spec.communication
    if spec.cross_device is not None:
        env[environment.CROSS_DEVICE] = spec.cross_device
    env.update(spec.rules.env)
    if spec.logs is not None:
        env[environment.LOG_DIR] = f"{spec.logs}/{task.file_name}"
    if spec.checkpoint_directory is not None:
        env[environment.CHECKPOINT_DIR] = spec.checkpoint_directory
    if config is not None:
        # The agent holds the port with SO_REUSEPORT until TensorFlow has bound it as well.
        env["TF_GRPC_REUSE_PORT"] = "true"
        env[environment.TF_CONFIG] = json.dumps(config, separators=(",", ":"))
    return env


def _opens_port(spec: ClusterSpec, task: TaskId, config: TfConfig | None, size: int) -> bool:
    """With TensorFlow, every task of a cluster except the evaluator; with PyTorch, rank 0, where all meet."""
    if spec.framework == "torch":
        return size > 1 and task == TaskId("worker", 0)
    return config is not None and task.type != "evaluator"
