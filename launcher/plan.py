"""From a spec to what every task gets: node, address, port, GPUs, environment, TF_CONFIG. Pure.

Ports are free to change between the plan and the run: a node's agent takes the ones that are free there, and
`make_plan` is called again with them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.spec import ClusterSpec, NodeSpec
from launcher.tasks import TaskId
from launcher.tf_config import TfConfig, format_address, make_tf_configs
from worker_entry.orders import Preload
from worker_entry.values import Program, TaskRequest

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(?:^|_)PASS$|API_?KEY|_KEY|^KEY|CREDENTIAL", re.IGNORECASE
)
REDACTED = "(redacted)"

_NO_GPU = "-1"
"""CUDA_VISIBLE_DEVICES of a task that must see none; an empty value would do as well, but says nothing to a reader."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node has said of itself; `cores` those that tasks may use, `gpus` as CUDA_VISIBLE_DEVICES names them."""

    cores: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskPlan:
    """One task as it will be started.

    `env` is laid over the node's own environment; the values of the names in `secrets` are never shown.
    `port` is held for the task even if it never opens it. `directory` is its working directory.
    """

    task: TaskId
    node: str
    directory: str
    python: str
    address: str
    port: int
    explicit_port: bool
    program: Program
    tf_config: TfConfig | None
    env: Mapping[str, str] = field(repr=False)
    secrets: frozenset[str]
    mend_keras: bool
    progress: bool = True

    @property
    def opens_port(self) -> bool:
        """Whether TensorFlow starts a server on the port: in every task of a cluster but the evaluator."""
        return self.tf_config is not None and self.task.type != "evaluator"

    @property
    def request(self) -> TaskRequest:
        """What the task's node is asked to have ready."""
        return TaskRequest(str(self.task), self.program, self.port if self.explicit_port else 0)

    def shown_env(self) -> dict[str, str]:
        """The environment as it may be shown."""
        return {name: REDACTED if name in self.secrets else value for name, value in self.env.items()}


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started where. `directory` is the tasks' working directory, but on nodes that it is sent to."""

    name: str
    strategy: str
    directory: str
    tasks: tuple[TaskPlan, ...]
    warnings: tuple[str, ...] = ()
    preload: tuple[str, ...] | None = None
    """The modules that each node imports ahead besides TensorFlow; None: nothing is imported ahead."""

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
    dialled: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Makes the plan.

    Args:
        spec: what the user wants.
        directory: the working directory where the spec names none.
        environ: where the values of `env_from` come from.
        python: the interpreter of local nodes whose spec names none; remote ones use `python3`.
        facts: what is known of the nodes, by host; nodes that are missing get no share of cores and GPUs.
        ports: the ports that were taken; without it, the ones that will be if all are free.
        dialled: the addresses that the checks chose, by host; without it, the first candidates.

    Raises:
        UsageError: the nodes have not what the spec asks of them.
    """
    placements = list(spec.placements())
    ports = ports or dict(_expected_ports(spec, placements))
    chosen = dialled or {}
    addresses = {task: format_address(chosen.get(node.host, node.dialled), ports[task]) for node, task in placements}
    configs = make_tf_configs(addresses)
    shares = {}
    warnings: list[str] = []
    for node in spec.nodes:
        tasks = [task for owner, task in placements if owner is node]
        shares.update(_shares(node, tasks, (facts or {}).get(node.host), warnings))
    secrets = {name: environ.get(name, "") for name in spec.env_from}
    plans = []
    for node, task in placements:
        own = _own_env(task, configs[task], spec.checkpoint_directory)
        env = {**own, **shares[task], **spec.env, **node.env, **secrets}
        plans.append(
            TaskPlan(
                task=task,
                node=node.host,
                directory=_directory(spec, node, directory),
                python=node.python or (python if node.is_local else "python3"),
                address=addresses[task].rpartition(":")[0],
                port=ports[task],
                explicit_port=node.port is not None,
                program=program_of(spec),
                tf_config=configs[task],
                env=env,
                secrets=frozenset([*secrets, *filter(_SECRET_NAME.search, env)]),
                mend_keras=spec.keras.mend,
                progress=spec.progress,
            )
        )
    return LaunchPlan(
        name=spec.name,
        strategy=spec.strategy,
        directory=_directory(spec, None, directory),
        tasks=tuple(plans),
        warnings=tuple(warnings),
        preload=_preloaded(spec),
    )


def _preloaded(spec: ClusterSpec) -> tuple[str, ...] | None:
    if spec.program.command is not None or spec.preload is False:
        return None
    return () if spec.preload is True else tuple(spec.preload)


def make_preload(plan: LaunchPlan, node: str, *, keep: bool) -> Preload | None:
    """What a node has to import before its tasks can be forked there; None: nothing.

    Args:
        plan: made with the node's facts.
        node: its host.
        keep: whether another attempt may follow.
    """
    tasks = [task for task in plan.tasks if task.node == node]
    if plan.preload is None or not tasks:
        return None
    common = set.intersection(*(set(task.env.items()) for task in tasks))
    return Preload(tasks[0].program, dict(common), ["TF_CONFIG"], list(plan.preload), keep)


def _directory(spec: ClusterSpec, node: NodeSpec | None, default: str) -> str:
    if spec.sync is None:
        return spec.working_directory or default
    return str(Path(default, spec.sync.path)) if node is None or node.is_local else spec.sync.to


def _expected_ports(spec: ClusterSpec, placements: Sequence[tuple[NodeSpec, TaskId]]) -> Iterator[tuple[TaskId, int]]:
    following = {node.host: node.port or spec.ports.first for node in spec.nodes}
    for node, task in placements:
        yield task, following[node.host]
        following[node.host] += 1


def program_of(spec: ClusterSpec) -> Program:
    """What every task runs."""
    program = spec.program
    if program.command is not None:
        return Program("command", program.command[0], list(program.command[1:]))
    if program.module is not None:
        return Program("module", program.module, list(program.args))
    assert program.script is not None
    return Program("script", program.script, list(program.args))


def _own_env(task: TaskId, config: TfConfig | None, checkpoints: str | None) -> dict[str, str]:
    env = {
        "DISTLAUNCH_TASK": str(task),
        # Output reaches the log as it is written, also when the task is killed.
        "PYTHONUNBUFFERED": "1",
        # All of TensorFlow's words go into the log; the console folds them.
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    if checkpoints is not None:
        env["DISTLAUNCH_CHECKPOINT_DIR"] = checkpoints
    if config is not None:
        # The agent holds the port with SO_REUSEPORT until TensorFlow has bound it, too.
        env["TF_GRPC_REUSE_PORT"] = "true"
        env["TF_CONFIG"] = json.dumps(config, separators=(",", ":"))
    return env


def _shares(
    node: NodeSpec, tasks: Sequence[TaskId], facts: NodeFacts | None, warnings: list[str]
) -> dict[TaskId, dict[str, str]]:
    """The environment that gives each task of a node its part of the cores and GPUs."""
    shares: dict[TaskId, dict[str, str]] = {task: {} for task in tasks}
    if facts is not None and len(tasks) > 1:
        threads = max(1, facts.cores // len(tasks))
        for share in shares.values():
            share["OMP_NUM_THREADS"] = share["TF_NUM_INTRAOP_THREADS"] = str(threads)
            # One inter-op thread can deadlock collectives.
            share["TF_NUM_INTEROP_THREADS"] = str(max(2, threads))
    found = facts.gpus if facts is not None else ()
    gpus = tuple(node.gpus) if node.gpus is not None else found
    trainers = [task for task in tasks if task.trains]
    wanted = (node.gpus_per_worker or 0) * len(trainers)
    if facts is not None and wanted > len(gpus):
        raise UsageError(
            f"{node.host} has {len(gpus)} GPUs, {len(trainers)} workers with {node.gpus_per_worker} each need {wanted}",
            cure="lower gpus_per_worker (--gpus-per-worker), or the number of workers",
        )
    absent = [gpu for gpu in gpus if gpu.isdigit() and gpu not in found] if facts is not None else []
    if absent:
        warnings.append(f"{node.host} has no GPU {', '.join(absent)}: TensorFlow would train on the CPU instead")
    if not gpus and node.gpus is None:
        return shares
    if trainers and len(trainers) > len(gpus) > 0:
        warnings.append(
            f"{len(trainers)} workers share {len(gpus)} GPU{'s'[: len(gpus) > 1]} on {node.host}: memory grows as "
            "needed; with NCCL two workers must not share a GPU"
        )
        for index, task in enumerate(trainers):
            shares[task]["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
            shares[task]["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        rest: tuple[str, ...] = ()
    else:
        size = node.gpus_per_worker or len(gpus) // max(1, len(trainers))
        for index, task in enumerate(trainers):
            shares[task]["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * size : (index + 1) * size]) or _NO_GPU
        rest = gpus[size * len(trainers) :]
    for task in tasks:
        if not task.trains:  # what is left over when each trainer has its share
            shares[task]["CUDA_VISIBLE_DEVICES"] = ",".join(rest if task.type == "evaluator" else ()) or _NO_GPU
    return shares


# --- the plan as data and as commands ---


def render_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan for `--json` and for the run's files, without secrets."""
    return {
        "name": plan.name,
        "strategy": plan.strategy,
        "directory": plan.directory,
        "warnings": list(plan.warnings),
        "tasks": [
            {
                "task": str(task.task),
                "node": task.node,
                "python": task.python,
                "address": task.address,
                "port": task.port,
                "program": {
                    "kind": task.program.kind,
                    "target": task.program.target,
                    "args": task.program.args,
                },
                "tf_config": task.tf_config,
                "env": task.shown_env(),
                "command": render_by_hand(task),
            }
            for task in plan.tasks
        ],
    }


def render_by_hand(task: TaskPlan) -> str:
    """The shell command that runs this one task by hand on its node; secrets are taken from the shell's environment.

    A Python program needs distlaunch installed there, which mends Keras for it.
    """
    settings = [
        f'{name}="${name}"' if name in task.secrets else f"{name}={shlex.quote(value)}"
        for name, value in task.env.items()
    ]
    program = task.program
    if program.kind == "command":
        command = shlex.join([program.target, *program.args])
    else:
        flags = [] if task.mend_keras else ["--no-keras-mend"]
        target = ["-m", program.target] if program.kind == "module" else [program.target]
        words = shlex.join(["-m", "worker_entry", "run", *flags, *target, *program.args])
        command = f"{_quote_path(task.python)} {words}"
    return f"cd {_quote_path(task.directory)} && env -u TF_CONFIG {' '.join(settings)} {command}"


def _quote_path(path: str) -> str:
    """For the node's shell, which knows what `~` is there."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def render_text(plan: LaunchPlan) -> str:
    """The plan for people: a block for each task."""
    tasks, nodes = len(plan.tasks), len(plan.nodes)
    size = f"{tasks} task{'s'[: tasks > 1]} on {nodes} node{'s'[: nodes > 1]}"
    lines = [f"{plan.name}: {plan.strategy}, {size}, in {plan.directory}"]
    lines += [f"Warning: {warning}" for warning in plan.warnings]
    for task in plan.tasks:
        port_note = "" if task.explicit_port else " (or the next free port)"
        config = "unset" if task.tf_config is None else json.dumps(task.tf_config)
        env = {name: value for name, value in task.shown_env().items() if name != "TF_CONFIG"}
        lines += [
            "",
            f"{task.task} on {task.node}",
            f"  address    {format_address(task.address, task.port)}{port_note}",
            f"  TF_CONFIG  {config}",
            *(f"  {'env' if i == 0 else '':<9}  {name}={value}" for i, (name, value) in enumerate(sorted(env.items()))),
            f"  by hand    {render_by_hand(task)}",
        ]
    return "\n".join(lines)
