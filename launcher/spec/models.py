"""The cluster spec as frozen values; `loading` reads them from YAML.

Every scalar of a spec file arrives as the text in the file, and the field's type decides what it means: `args: [3]` is
the text "3", and `env: {DEBUG: no}` is the text "no".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, StringConstraints, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from launcher.spec.contradictions import find_contradictions, render_path
from launcher.spec.fields import (
    MANY,
    ONE,
    Address,
    AtMost,
    Environment,
    FilledText,
    GpuName,
    HostName,
    Keepable,
    Listen,
    Network,
    Port,
    PortRange,
    Ports,
    Preload,
    VariableName,
)
from launcher.spec.parts import (
    KerasSpec,
    Model,
    NodeSourceSpec,
    NotifySpec,
    ProgramSpec,
    RestartSpec,
    SshSpec,
    SyncSpec,
    TimeoutsSpec,
    Way,
)
from launcher.spec.strategies import RULES, TORCH, Framework, StrategyRules
from launcher.tasks import TASK_TYPES, TaskId, TaskType
from worker_entry.protocol.strategy_names import Communication, CrossDevice, StrategyName

DEMO_MODULE = "worker_entry.demo.train"
"""The built-in demo, which runs when a spec names no program."""

LOCAL = "local"
"""The `host` of this machine."""
LOOPBACK = "127.0.0.1"


class NodeSpec(Model):
    """One machine of the cluster."""

    host: HostName
    """The SSH host of the machine; `local` is this machine."""
    address: Address | None = None
    """The name or address that the other workers dial, if it differs from `host`."""
    addresses: Annotated[list[Address], Field(min_length=1)] | None = None
    """Several addresses instead of `address`: the first one that every node reaches is used."""
    tasks: Annotated[dict[TaskType, Annotated[int, Field(ge=0)]], Field(min_length=1)] = {"worker": 1}
    """How many tasks of each type run here."""
    spare: bool = False
    """Runs no tasks at first; takes the place of a lost node when the cluster restarts."""
    port: Port | None = None
    """The port of the first task here; the next tasks get the next ports. Default: free ports from `ports`."""
    gpus: list[GpuName] | None = None
    """The GPUs that the tasks here share, as CUDA_VISIBLE_DEVICES names them; `[]` for none. Default: all."""
    gpus_per_worker: Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs")] | None = None
    """GPUs for each training task here. Default: an equal share."""
    python: FilledText | None = None
    """The Python interpreter to use on this node."""
    env: Environment = {}
    """Environment variables of the tasks here; they override those of the cluster."""
    way: Way | None = None
    """How a command is run on this node, if not as on the others."""
    ssh: SshSpec = SshSpec()
    """How to reach this node; overrides the cluster's `ssh`."""

    def count(self, task_type: TaskType) -> int:
        """How many tasks of this type run here from the start."""
        return 0 if self.spare else self.tasks.get(task_type, 0)

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def candidates(self) -> list[str]:
        """The names or addresses at which other tasks may reach the tasks here."""
        if self.address is not None or self.addresses is None:
            return [self.address or (LOOPBACK if self.is_local else self.host.rpartition("@")[2])]
        return self.addresses

    @property
    def default_address(self) -> str:
        """The candidate that is used unless the checks choose another."""
        return self.candidates[0]


class ListedNodesSpec(Model):
    """Nodes that a command names, instead of a list of nodes."""

    source: Annotated[NodeSourceSpec, Field(alias="from")]
    """What names the nodes; asked at the start, and again before each restart."""
    known: list[NodeSpec] = []
    """The last answer, which distlaunch writes to the run's files. Leave it out."""


class Nodes(list[NodeSpec]):
    """The nodes that a source has named; none while it has not been asked."""

    def __init__(self, nodes: Iterable[NodeSpec] = (), source: NodeSourceSpec | None = None) -> None:
        super().__init__(nodes)
        self.source = source


@dataclass(frozen=True)
class _MayBeListed:
    """Lets a list of nodes be written as `{from: …}`; reading makes it a `Nodes`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = handler(source)
        either = core_schema.tagged_union_schema(
            {MANY: written, ONE: handler.generate_schema(ListedNodesSpec)},
            lambda value: ONE if isinstance(value, dict) and "from" in value else MANY,
        )
        return core_schema.no_info_wrap_validator_function(
            _read_nodes,
            either,
            serialization=core_schema.wrap_serializer_function_ser_schema(_write_nodes, schema=written),
        )


def _read_nodes(value: Any, read: core_schema.ValidatorFunctionWrapHandler) -> list[NodeSpec]:
    source = value.source if isinstance(value, Nodes) else None
    if source is not None and not value:
        return Nodes((), source)
    nodes = read(value)
    if isinstance(nodes, ListedNodesSpec):
        return Nodes(nodes.known, nodes.source)
    return nodes if source is None else Nodes(nodes, source)


def _write_nodes(nodes: list[NodeSpec], write: core_schema.SerializerFunctionWrapHandler) -> Any:
    if not isinstance(nodes, Nodes) or nodes.source is None:
        return write(nodes)
    known = {"known": write(nodes)} if nodes else {}
    return {"from": nodes.source.model_dump(), **known}


class ClusterSpec(Model):
    """A cluster and the program that it runs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "cluster"
    """The cluster's name; part of each run's name."""
    nodes: Annotated[list[NodeSpec], Field(min_length=1), _MayBeListed()]
    """The machines, in the order in which tasks are numbered; or a command that names them."""
    program: ProgramSpec = ProgramSpec(module=DEMO_MODULE)
    """What every task runs. Default: the built-in demo."""
    framework: Framework = "tensorflow"
    """What the program trains with; `torch` sets the variables of `torchrun` instead of TF_CONFIG."""
    strategy: StrategyName = "multi_worker_mirrored"
    """The tf.distribute strategy that the program uses."""
    devices: Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs to emulate")] | None = None
    """Splits the CPU into this many devices for each task without a GPU, to emulate a machine with several."""
    communication: Communication = "auto"
    """All-reduce algorithm between workers, for programs that let distlaunch build their strategy."""
    cross_device: CrossDevice | None = None
    """All-reduce algorithm within a mirrored process, for such programs. Default: TensorFlow's choice."""
    working_directory: FilledText | None = None
    """Where the program runs. Default: the folder in which distlaunch is called."""
    sync: SyncSpec | None = None
    """Sends a folder to the other machines, and runs the program in it. Default: the program is already there."""
    tensorboard: Keepable = False
    """Runs TensorBoard on the chief's node; with `keep` it stays after the training, until Ctrl-C."""
    log_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")] | None = None
    """What TensorBoard shows; DISTLAUNCH_LOG_DIR names each task's own folder below it. Default: `logs` in
    `checkpoint_directory` or, if all nodes are this machine, a folder of the run."""
    checkpoint_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")] | None = None
    """A folder that all nodes share; checked before the start, and passed to the tasks in DISTLAUNCH_CHECKPOINT_DIR."""
    env: Environment = {}
    """Environment variables of every task."""
    env_from: list[VariableName] = []
    """Variables to take from distlaunch's own environment; their values are never shown."""
    ports: Ports = PortRange(first=20000, last=20999)
    """The range from which each node takes free ports."""
    guard: Literal["auto", "required", "off"] = "auto"
    """Keeps all but the cluster from the tasks' ports: where the system can, or else the run does not start."""
    allow: list[Network] = []
    """Networks that may reach the tasks' ports, too, like `10.0.0.0/24`."""
    isolation: Literal["none", "namespace", "tunnel"] = "none"
    """Whether tasks live in a network of their own, which other users of the machine do not reach: `namespace` on one
    machine; `tunnel` on several, with encrypted connections between them."""
    way: Way = "paramiko"
    """How a command is run on the nodes: over SSH by `paramiko`, which shares one connection among all that is asked
    there, or by `openssh`, the user's own `ssh`; in running containers by `docker`; or by a program of your own."""
    ssh: SshSpec = SshSpec()
    host_keys: Literal["strict", "accept-new"] = "strict"
    """Whether to refuse a host key that is not in known_hosts, or to accept it and add it there."""
    keras: KerasSpec = KerasSpec()
    progress: bool = True
    """Counts the steps of `model.fit`, to show slow workers and to detect stalled clusters."""
    sample_every_s: Annotated[float, Field(ge=0), AtMost(3600, "a run would have next to no samples")] = 2.0
    """How often each node measures what its tasks use, in seconds; 0: never."""
    report: bool = False
    """Writes `report.html` to the run's files at its end: one page to look at."""
    metrics: Listen | None = None
    """Serves metrics for Prometheus at this `ADDRESS:PORT` of the machine that runs distlaunch; a port alone is on
    127.0.0.1. Default: not served."""
    metrics_file: FilledText | None = None
    """A file to which they are written every few seconds, for node_exporter: its name ends with `.prom`."""
    notify: NotifySpec | None = None
    """Who is notified when the run fails, stalls, restarts or succeeds."""
    keep_own_tf_config: bool = False
    """Lets the program set or remove TF_CONFIG. Otherwise the program keeps the cluster's TF_CONFIG."""
    preload: Preload = True
    """Imports TensorFlow once on each node, and forks the Python tasks from there; a list adds modules to import."""
    restart: RestartSpec = RestartSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> ClusterSpec:
        problems = [*find_contradictions(self)]
        if problems:
            text = "; ".join(f"{render_path(path)}: {message}" for path, message in problems)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "problems": problems})
        return self

    @property
    def source(self) -> NodeSourceSpec | None:
        """What names the nodes, if the spec does not; there are no nodes before it has been asked."""
        return self.nodes.source if isinstance(self.nodes, Nodes) else None

    def with_nodes(self, nodes: Iterable[Any]) -> ClusterSpec:
        """The spec with these nodes, or with nodes of these fields; the source stays the same.

        Raises:
            ValidationError: the result would not be valid.
        """
        return self.changed(nodes=list(nodes) if self.source is None else Nodes(nodes, self.source))

    @property
    def is_local(self) -> bool:
        """Whether all nodes are this machine."""
        return all(node.is_local for node in self.nodes)

    @property
    def logs(self) -> str | None:
        """Where tasks write what TensorBoard shows, if that is known."""
        if self.log_directory is None and self.checkpoint_directory is not None:
            return f"{self.checkpoint_directory.rstrip('/')}/logs"
        return self.log_directory

    @property
    def rules(self) -> StrategyRules:
        """The rules of the strategy, or of a framework that has none."""
        return TORCH if self.framework == "torch" else RULES[self.strategy]

    def placements(self) -> Iterator[tuple[NodeSpec, TaskId]]:
        """Every task with its node; indices count through the nodes in order."""
        counts: dict[TaskType, int] = dict.fromkeys(TASK_TYPES, 0)
        for node in self.nodes:
            for task_type in TASK_TYPES:
                for _ in range(node.count(task_type)):
                    yield node, TaskId(task_type, counts[task_type])
                    counts[task_type] += 1
