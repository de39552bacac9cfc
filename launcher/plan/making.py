"""Makes the launch plan of a spec.

Ports may change between the plan and the run: a node's agent takes ports that are free there, and `make_plan` is called
again with these ports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.plan.import_env import OF_PYTHON, OF_TENSORFLOW
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.layout import Layout, lay_out
from launcher.plan.resources import NO_GPU, NodeFacts, share_resources
from launcher.plan.tf_config import TfConfig
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import LOOPBACK, NodeSpec
from launcher.spec.redaction import is_secret
from launcher.tasks import TENSORBOARD, AuxiliaryType, TaskId, TaskType
from worker_entry.protocol import environment
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program

REUSE_PORT = "TF_GRPC_REUSE_PORT"
SERVER_MODULE = "worker_entry.task.server"
"""The program of the tasks that run TensorFlow's server."""


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
    """Makes the plan of a run.

    Args:
        spec: the user's spec.
        directory: the working directory, if the spec names none.
        environ: the source of the values of `env_from`.
        python: the interpreter of local and Slurm nodes whose spec names none; other nodes use `python3`.
        facts: the cores and GPUs of nodes, by host; on other nodes, the tasks get no share.
        ports: the ports that the nodes hold; by default, the ports that they take if all are free.
        chosen_addresses: the addresses that the checks chose, by host; by default, the first candidates.

    Raises:
        UsageError: a node lacks what the spec asks for.
    """
    layout = lay_out(spec, ports, chosen_addresses or {})
    warnings: list[str] = []
    plans = [
        task
        for node in spec.nodes
        for task in plan_node(
            spec,
            node,
            layout,
            directory=directory,
            environ=environ,
            python=python,
            facts=(facts or {}).get(node.host),
            warnings=warnings,
            chosen=chosen_addresses or {},
        )
    ]
    if layout.routes and any(known.gpus for known in (facts or {}).values()) and spec.rules.collective:
        warnings.append("NCCL does not go through the tunnel: train with CommunicationImplementation.RING")
    if spec.tensorboard:
        plans.append(_plan_board(spec, layout, next(task for task in plans if task.node == layout.chief)))
    return LaunchPlan(
        name=spec.name,
        strategy=spec.strategy if spec.framework == "tensorflow" else spec.framework,
        rules=spec.rules,
        directory=runs_in(spec, None, directory),
        tasks=tuple(plans),
        warnings=tuple(warnings),
        routes=layout.routes,
        unasked=tuple(node.host for node in spec.nodes if facts and node.host not in facts),
    )


def plan_node(
    spec: ClusterSpec,
    node: NodeSpec,
    layout: Layout,
    *,
    directory: str,
    environ: Mapping[str, str],
    python: str,
    facts: NodeFacts | None,
    warnings: list[str],
    chosen: Mapping[str, str],
) -> Iterator[TaskPlan]:
    """Yields the tasks of one node; see `make_plan`. Adds warnings for the user to `warnings`."""
    rules, tasks = spec.rules, layout.tasks[node.host]
    shares = share_resources(node, tasks, rules, facts, warnings)
    secrets = {name: environ.get(name, "") for name in spec.env_from}
    for task in tasks:
        config = layout.configs[task]
        own = own_env(spec, task, config)
        own |= {environment.CACHE: spec.cache} if spec.cache is not None else {}
        users = {**spec.env, **node.env, **secrets}
        share = shares[task]
        of_framework = {**layout.framework_envs.get(task, {}), **_local_devices(spec, share)}
        env = {**own, **of_framework, **share, **users}
        yield TaskPlan(
            task=task,
            node=node.host,
            directory=runs_in(spec, node, directory),
            python=spec.find_python(node, python, facts.python if facts is not None else ""),
            address=layout.addresses[task].rpartition(":")[0],
            port=layout.ports[task],
            explicit_port=node.port is not None,
            program=program_of(spec, task.type),
            tf_config=config,
            env=env,
            secrets=frozenset([*secrets, *(name for name, value in env.items() if is_secret(name, value))]),
            patch_keras=spec.keras.patch and rules.patches_keras and task.type not in rules.serves,
            progress=spec.progress and task.type not in rules.serves,
            collective=rules.collective,
            opens_port=_opens_port(spec, task, config, layout.size),
            reuse_address=spec.framework == "torch",
            keep_own_tf_config=spec.keep_own_tf_config,
            other_addresses=() if node.host in chosen else tuple(node.candidates[1:]),
            defaults=frozenset(environment.DEFAULTS) & env.keys() - users.keys(),
        )


def _plan_board(spec: ClusterSpec, layout: Layout, beside: TaskPlan) -> TaskPlan:
    """The plan of TensorBoard, which listens only on the loopback address because it authenticates no users.

    TensorBoard gets the variables of a task on the same node, except for those that describe the cluster, so that it
    finds the same storage, and can be forked from the same process.
    """
    of_cluster = {*environment.OF_TASKS, REUSE_PORT, *spec.rules.env, *layout.framework_envs.get(beside.task, ())}
    shared = {name: value for name, value in beside.env.items() if name not in of_cluster}
    port = layout.ports[TENSORBOARD]
    words = ["--logdir", spec.logs or "", "--host", LOOPBACK, "--port", str(port), "--reload_interval", "5"]
    return TaskPlan(
        task=TENSORBOARD,
        node=beside.node,
        directory=beside.directory,
        python=beside.python,
        address=LOOPBACK,
        port=port,
        explicit_port=False,
        program=Program("module", "tensorboard.main", words),
        tf_config=None,
        env={**shared, environment.TASK: str(TENSORBOARD), "CUDA_VISIBLE_DEVICES": NO_GPU},
        secrets=beside.secrets & shared.keys(),
        patch_keras=False,
        progress=False,
        collective=False,
        reuse_address=True,
        defaults=beside.defaults,
    )


def make_preload(spec: ClusterSpec, tasks: Sequence[TaskPlan], *, keep: bool) -> Preload | None:
    """The order for a node to import modules before it forks its tasks; None if it imports nothing.

    Args:
        spec: the user's spec.
        tasks: the tasks of the node, planned with its facts.
        keep: whether another attempt may follow, or a task may restart individually.
    """
    if spec.program.command is not None or spec.preload is False or not tasks:
        return None
    modules = [] if spec.preload is True else [*spec.preload]
    common = set.intersection(*(set(task.env.items()) for task in tasks))
    defaults = sorted(frozenset.intersection(*(task.defaults for task in tasks)))
    return Preload(tasks[0].program, dict(common), [environment.TF_CONFIG], modules, keep, defaults, spec.framework)


def runs_in(spec: ClusterSpec, node: NodeSpec | None, default: str) -> str:
    """The folder in which the program runs on a node, or on this machine if None; `default`: the current folder."""
    if spec.sync is None:
        return spec.working_directory or default
    return str(Path(default, spec.sync.path)) if node is None or node.is_local else spec.sync.to


def program_of(spec: ClusterSpec, task_type: TaskType | AuxiliaryType | None = None) -> Program:
    """The program that tasks of this type run; without a type, the user's program."""
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
    """The variables of a task that follow from the spec's fields other than `env`, without TF_CONFIG."""
    env = {environment.TASK: str(task), **OF_PYTHON}
    if spec.framework == "tensorflow":
        env |= {environment.STRATEGY: spec.strategy, **OF_TENSORFLOW}
    if spec.devices is not None:
        env[environment.DEVICES] = str(spec.devices)
        if spec.framework == "jax":
            env["JAX_NUM_CPU_DEVICES"] = str(spec.devices)
    if spec.communication != "auto" or spec.isolation == "tunnel":  # NCCL opens its own connections
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
        env[REUSE_PORT] = "true"
    return env


def _local_devices(spec: ClusterSpec, share: Mapping[str, str]) -> dict[str, str]:
    """The variable that keeps a process of JAX from taking one GPU only, because it sees a job of Slurm or MPI."""
    gpus = share.get("CUDA_VISIBLE_DEVICES", NO_GPU)
    if spec.framework != "jax" or gpus == NO_GPU:
        return {}
    return {environment.JAX_DEVICES: ",".join(map(str, range(len(gpus.split(",")))))}


def _opens_port(spec: ClusterSpec, task: TaskId, config: TfConfig | None, size: int) -> bool:
    """Whether the framework opens the task's port: TensorFlow for every task of a cluster except the evaluator, others
    only for rank 0, to which all tasks connect."""
    if spec.framework != "tensorflow":
        return size > 1 and task == TaskId("worker", 0)
    return config is not None and task.type != "evaluator"
