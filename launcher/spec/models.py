"""The cluster spec as frozen values; `loading` reads them from YAML.

Every scalar of a spec file arrives as the text in the file, and the field's type decides what it means: `args: [3]` is
the text "3", and `env: {DEBUG: no}` is the text "no".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from launcher.spec import field_options
from launcher.spec.contradictions import find_contradictions, render_path
from launcher.spec.fields import (
    AtMost,
    Collected,
    Environment,
    FilledText,
    Keepable,
    Listen,
    Network,
    PortRange,
    Ports,
    Preload,
    VariableName,
)
from launcher.spec.nodes import PYTHON, SLURM, MayBeListed, Nodes, NodeSpec, Source
from launcher.spec.parts import (
    DEMOS,
    Connection,
    KerasSpec,
    Model,
    NotifySpec,
    ProgramSpec,
    RestartSpec,
    SlurmSpec,
    SshSpec,
    SyncSpec,
    TimeoutsSpec,
)
from launcher.spec.pods import PodsSpec
from launcher.spec.strategies import FRAMEWORKS, RULES, Framework, StrategyRules
from launcher.tasks import TASK_TYPES, TaskId, TaskType
from worker_entry.protocol.strategy_names import Communication, CrossDevice, StrategyName


class ClusterSpec(Model):
    """A cluster and the program that it runs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "cluster"
    """The cluster's name; part of each run's name."""
    nodes: Annotated[list[NodeSpec], Field(min_length=1), MayBeListed()]
    """The machines, in the order in which tasks are numbered; or a command that lists them; or pods; or `slurm`, the
    nodes of the Slurm job that distlaunch runs in."""
    framework: Annotated[Framework, field_options.FRAMEWORK] = "tensorflow"
    """The framework of the program. Instead of TF_CONFIG, `torch` sets the variables of `torchrun`, and `jax` those of
    `jax.distributed`; both set those of Keras' `initialize`."""
    program: Annotated[ProgramSpec, Field(validate_default=True)] = DEMOS["tensorflow"]
    """The program that every task runs. Default: the built-in demo of the framework; PyTorch has none."""
    strategy: Annotated[StrategyName, field_options.STRATEGY] = "multi_worker_mirrored"
    """The tf.distribute strategy that the program uses."""
    devices: Annotated[
        Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs to emulate")] | None, field_options.DEVICES
    ] = None
    """Splits the CPU of each task without a GPU into this many devices, to emulate a machine with several GPUs."""
    communication: Communication = "auto"
    """All-reduce algorithm between workers, for programs that let distlaunch build their strategy."""
    cross_device: CrossDevice | None = None
    """All-reduce algorithm between the devices of a mirrored process, for programs that let distlaunch build their
    strategy. Default: TensorFlow's choice."""
    python: Annotated[FilledText | None, field_options.PYTHON] = None
    """The Python interpreter of all nodes. Default: on this machine and in a Slurm job, the one that runs distlaunch;
    on other machines, the virtual environment that distlaunch runs in if its path exists there, or else `python3`."""
    working_directory: FilledText | None = None
    """The folder in which the program runs. Default: the folder in which distlaunch is called."""
    sync: SyncSpec | None = None
    """Sends a folder to the other machines, and runs the program in it. Default: the program is already there."""
    tensorboard: Annotated[Keepable, field_options.TENSORBOARD] = False
    """Runs TensorBoard on the chief's node; with `keep`, TensorBoard stays after training until Ctrl-C."""
    log_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$")] | None = None
    """The folder that TensorBoard shows; DISTLAUNCH_LOG_DIR names each task's own folder in it. Default: `logs` in
    `checkpoint_directory` or, if all nodes are this machine, a folder of the run."""
    checkpoint_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$")] | None = None
    """A folder that all nodes share, or each has, with `collect`; checked before the start, and passed to the tasks in
    DISTLAUNCH_CHECKPOINT_DIR."""
    collect: list[Collected] = []
    """Patterns, as in .gitignore, of files that come to the run's folder at its end: what tasks have written into their
    working directory. Checkpoints in `checkpoint_directory` then come whenever one is saved, need no shared disk, and
    are brought to a node that continues in place of a lost one."""
    collect_limit_gib: Annotated[float, Field(gt=0), AtMost(1_000_000, "no disk has more")] = 20.0
    """The limit of collected files, in GiB; if a node's files would exceed it, none of them is collected."""
    cache: Annotated[str, StringConstraints(pattern=r"^(~/|/)[^\x00\s'\"]*$")] | None = None
    """A folder on each node, which nodes may share, that keeps the code that XLA or PyTorch compiles for later runs."""
    stdin: Literal["chief", "all", "none"] = "chief"
    """Which tasks read distlaunch's stdin from a pipe or a file: the chief, or the first worker if there is no chief;
    all tasks that run the program; or none. All other tasks read /dev/null."""
    env: Environment = {}
    """Environment variables of every task."""
    env_from: list[VariableName] = []
    """Variables to take from distlaunch's own environment; their values are never shown."""
    ports: Ports = PortRange(first=20000, last=20999)
    """The range from which each node takes free ports."""
    guard: Literal["auto", "required", "off"] = "auto"
    """Lets only the cluster reach the tasks' ports: `auto` where the system can, `required` always, or the run does not
    start."""
    allow: list[Network] = []
    """More networks that may reach the tasks' ports, like `10.0.0.0/24`."""
    isolation: Literal["none", "namespace", "tunnel"] = "none"
    """Runs the tasks in a separate network that other users of the machine cannot reach: `namespace` on one machine;
    `tunnel` on several, with encrypted connections between them."""
    connection: Connection = "paramiko"
    """How distlaunch runs a command on the nodes: over SSH, with its own client (`paramiko`) or the user's `ssh`
    (`openssh`); in running containers (`docker`); in running pods (`kubernetes`); in steps of a job (`slurm`); or with
    another program."""
    slurm: SlurmSpec = SlurmSpec()
    ssh: SshSpec = SshSpec()
    host_keys: Literal["strict", "accept-new"] = "strict"
    """`strict` refuses a host key that is not in known_hosts; `accept-new` accepts the key and adds it."""
    check_speed: bool = False
    """Measures nodes and links before the first start, as `check --speed` does, and warns about slow ones."""
    keras: KerasSpec = KerasSpec()
    progress: bool = True
    """Counts the steps of `model.fit`, to show slow workers and to detect stalled clusters."""
    sample_every_s: Annotated[float, Field(ge=0), AtMost(3600, "a run would have next to no samples")] = 2.0
    """The interval, in seconds, at which each node samples the resource usage of its tasks; 0: never."""
    report: Annotated[bool, field_options.REPORT] = False
    """Writes `report.html`, the report as one page, to the run's folder when the run ends."""
    metrics: Listen | None = None
    """Serves metrics for Prometheus at this `ADDRESS:PORT` of the machine that runs distlaunch; a port alone means
    127.0.0.1. Default: not served."""
    metrics_file: FilledText | None = None
    """A file for node_exporter, to which the metrics are written every few seconds; its name must end with `.prom`."""
    notify: NotifySpec | None = None
    """Who is notified when the run fails, stalls, restarts or succeeds."""
    keep_own_tf_config: bool = False
    """Lets TensorFlow use a TF_CONFIG that the program sets or removes. Otherwise, it uses the one of this cluster."""
    preload: Preload = True
    """Imports TensorFlow once per node, and forks the Python tasks from that process; a list adds modules to import."""
    keep_warm_s: Annotated[
        float, Field(ge=0), AtMost(86_400, "nodes should not be held for longer"), field_options.KEEP_WARM
    ] = 0.0
    """How long each node keeps the framework imported after the run, in seconds, to start the next run faster; 0: not
    at all."""
    wait_gpus_s: Annotated[
        Annotated[float, Field(ge=0), AtMost(31_536_000, "it is a year")] | None, field_options.WAIT_GPUS
    ] = None
    """Waits before each start until the GPUs that the tasks need are free on all nodes, for this long at most, in
    seconds; 0: without a limit. No other run that waits gets them then. Default: does not check who uses the GPUs."""
    restart: RestartSpec = RestartSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()

    @field_validator("program")
    @classmethod
    def _choose_demo(cls, program: ProgramSpec, info: ValidationInfo) -> ProgramSpec:
        framework = info.data.get("framework", "tensorflow")  # missing if its value is wrong
        return DEMOS.get(framework, program) if program == DEMOS["tensorflow"] else program

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> ClusterSpec:
        errors = [*find_contradictions(self)]
        if errors:
            text = "; ".join(f"{render_path(path)}: {message}" for path, message in errors)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "errors": errors})
        return self

    @property
    def source(self) -> Source | None:
        """The source that names the nodes, if the spec does not; until it is asked, there are no nodes."""
        source = self.nodes.source if isinstance(self.nodes, Nodes) else None
        if isinstance(source, PodsSpec) and source.python is None and self.python is not None:
            return source.changed(python=self.python)
        return source

    def without_secrets(self) -> ClusterSpec:
        """See Model."""
        nodes = self.nodes
        if not isinstance(nodes, Nodes):
            return super().without_secrets().changed(nodes=[node.without_secrets() for node in nodes])
        return super().without_secrets()

    def with_nodes(self, nodes: Iterable[Any]) -> ClusterSpec:
        """The spec with these nodes, given as nodes or as their fields; the source stays the same.

        Raises:
            ValidationError: the result would not be valid.
        """
        return self.changed(nodes=list(nodes) if self.source is None else Nodes(nodes, self.source))

    @property
    def runs_demo(self) -> bool:
        """Whether the program is a built-in demo, which nodes have with distlaunch itself."""
        return any(self.program.module == demo.module for demo in DEMOS.values())

    @property
    def is_local(self) -> bool:
        """Whether all nodes are this machine."""
        return all(node.is_local for node in self.nodes)

    @property
    def shares_files(self) -> bool:
        """Whether all nodes see the same run folder: true on one machine and, by convention, in a Slurm cluster."""
        return all(node.is_local or node.connection == SLURM for node in self.nodes)

    @property
    def logs(self) -> str | None:
        """The folder with the logs for TensorBoard, if it is known."""
        if self.log_directory is None and self.checkpoint_directory is not None:
            return f"{self.checkpoint_directory.rstrip('/')}/logs"
        return self.log_directory

    @property
    def rules(self) -> StrategyRules:
        """The rules of the strategy, or of a framework that has no strategies."""
        return FRAMEWORKS[self.framework][1] if self.framework in FRAMEWORKS else RULES[self.strategy]

    def tasks_for(self, workers: int, index: int) -> dict[TaskType, int]:
        """The tasks of the node at `index` if each node has this many workers; the first node also gets the other
        required roles."""
        tasks: dict[TaskType, int] = {"worker": workers}
        return tasks if index or self.strategy != "parameter_server" else {**tasks, "chief": 1, "ps": 1}

    def find_python(self, node: NodeSpec, own: str = sys.executable, found: str = "") -> str:
        """The interpreter of a node.

        Args:
            node: the node.
            own: the interpreter that runs distlaunch.
            found: the interpreter that the node uses, if it is known.
        """
        own = own if node.is_local or node.connection == SLURM else PYTHON
        return node.python or self.python or found or own

    def placements(self) -> Iterator[tuple[NodeSpec, TaskId]]:
        """Yields every task with its node; the tasks of each type are numbered in the order of the nodes."""
        counts: dict[TaskType, int] = dict.fromkeys(TASK_TYPES, 0)
        for node in self.nodes:
            for task_type in TASK_TYPES:
                for _ in range(node.count(task_type)):
                    yield node, TaskId(task_type, counts[task_type])
                    counts[task_type] += 1
