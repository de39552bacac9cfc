"""The nodes of a spec as frozen values: a list, or the source that names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from launcher.spec import field_options
from launcher.spec.fields import MANY, ONE, PODS, Address, AtMost, Environment, FilledText, GpuName, HostName, Port
from launcher.spec.parts import Connection, Model, NodeSourceSpec, SshSpec
from launcher.spec.pods import KUBERNETES, PodsSpec
from launcher.tasks import LOCAL, TaskType
from worker_entry.protocol.frozen import dataclass

LOOPBACK = "127.0.0.1"
PYTHON = "python3"
"""The interpreter of another machine by default, found on its PATH."""
SLURM: Literal["slurm"] = "slurm"
"""As the `nodes` of a spec: the nodes of the Slurm job that distlaunch runs in."""


class NodeSpec(Model):
    """One machine of the cluster."""

    host: HostName
    """The SSH host of the machine; `local` is this machine."""
    address: Address | None = None
    """The name or address that the other tasks dial, if it differs from `host`."""
    addresses: Annotated[list[Address], Field(min_length=1)] | None = None
    """Several addresses instead of `address`: the first one that every node reaches is used."""
    tasks: Annotated[dict[TaskType, Annotated[int, Field(ge=0)]], Field(min_length=1)] = {"worker": 1}
    """The number of tasks of each type that run here."""
    spare: bool = False
    """Runs no tasks at first; takes the place of a lost node when the cluster restarts."""
    port: Port | None = None
    """The port of the first task here; the next tasks get the next ports. Default: free ports from `ports`."""
    gpus: list[GpuName] | None = None
    """The GPUs that the tasks here share, as CUDA_VISIBLE_DEVICES names them; `[]` for none. Default: all."""
    gpus_per_worker: Annotated[
        Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs")] | None, field_options.GPUS_PER_WORKER
    ] = None
    """GPUs for each training task here. Default: an equal share."""
    python: FilledText | None = None
    """The Python interpreter to use on this node. Default: the cluster's `python`."""
    env: Environment = {}
    """Environment variables of the tasks here; they override those of the cluster."""
    connection: Connection | None = None
    """How distlaunch runs a command on this node. Default: the cluster's `connection`."""
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


_Asked = Annotated[
    Annotated[NodeSourceSpec, Tag(ONE)] | Annotated[Literal["slurm"], Tag(MANY)],
    Discriminator(lambda value: MANY if value == SLURM else ONE),
]
Source = NodeSourceSpec | Literal["slurm"] | PodsSpec
"""The source of a cluster's nodes: a command, the Slurm job that distlaunch runs in, or pods that the run creates."""


class ListedNodesSpec(Model):
    """Nodes that a command or Slurm names, instead of a list of nodes."""

    source: Annotated[_Asked, Field(alias="from")]
    """The source that names the nodes; asked at the start, and again before each restart."""
    known: list[NodeSpec] = []
    """The last answer of the source, which distlaunch writes to the run's files. Leave it out."""


class PodNodesSpec(PodsSpec):
    """Kubernetes pods that the run creates, instead of a list of nodes."""

    source: Annotated[Literal["kubernetes"], Field(alias="from")]
    """Always `kubernetes`."""
    known: list[NodeSpec] = []
    """The pods of the run, which distlaunch writes to the run's files. Leave it out."""


class Nodes(list[NodeSpec]):
    """The nodes that a source named; empty until the source is asked."""

    def __init__(self, nodes: Iterable[NodeSpec] = (), source: Source | None = None) -> None:
        super().__init__(nodes)
        self.source = source

    def without_secrets(self) -> Nodes:
        """See Model."""
        source = self.source.without_secrets() if isinstance(self.source, Model) else self.source
        return Nodes([node.without_secrets() for node in self], source)


@dataclass(frozen=True)
class MayBeListed:
    """Allows `{from: …}` or `slurm` in place of a list of nodes, and reads either as `Nodes`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = handler(source)
        either = core_schema.tagged_union_schema(
            {
                MANY: written,
                ONE: handler.generate_schema(ListedNodesSpec),
                PODS: handler.generate_schema(PodNodesSpec),
                SLURM: core_schema.literal_schema([SLURM]),
            },
            _tag,
        )
        return core_schema.no_info_wrap_validator_function(
            _read_nodes,
            either,
            serialization=core_schema.wrap_serializer_function_ser_schema(_write_nodes, schema=written),
        )


def _tag(value: Any) -> str:
    if value == SLURM:
        return SLURM
    if not isinstance(value, dict) or "from" not in value:
        return MANY
    return PODS if value["from"] == KUBERNETES else ONE


def _read_nodes(value: Any, read: core_schema.ValidatorFunctionWrapHandler) -> list[NodeSpec]:
    source = value.source if isinstance(value, Nodes) else None
    if source is not None and not value:
        return Nodes((), source)
    nodes = read(value)
    if nodes == SLURM:
        return Nodes((), SLURM)
    if isinstance(nodes, ListedNodesSpec):
        return Nodes(nodes.known, nodes.source)
    if isinstance(nodes, PodNodesSpec):
        given = nodes.model_fields_set & PodsSpec.model_fields.keys()
        return Nodes(nodes.known, PodsSpec(**{name: getattr(nodes, name) for name in given}))
    return nodes if source is None else Nodes(nodes, source)


def _write_nodes(nodes: list[NodeSpec], write: core_schema.SerializerFunctionWrapHandler) -> Any:
    if not isinstance(nodes, Nodes) or nodes.source is None:
        return write(nodes)
    known = {"known": write(nodes)} if nodes else {}
    if nodes.source == SLURM:
        return {"from": SLURM, **known} if nodes else SLURM
    if isinstance(nodes.source, PodsSpec):
        return {"from": KUBERNETES, **nodes.source.model_dump(exclude_defaults=True), **known}
    return {"from": nodes.source.model_dump(), **known}
