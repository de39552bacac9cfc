"""The cluster spec: what a user writes, as frozen values. `spec_file` reads them from YAML.

Every scalar of a spec file arrives as text, just as it was written, and the field's type decides what it means: an
`args: [3]` is the text "3", an `env: {DEBUG: no}` the text "no".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from launcher.tasks import TASK_TYPES, TRAINING_TYPES, TaskId, TaskType

DEMO_MODULE = "worker_entry.demo.train"
"""The built-in training job, which runs when a spec names no program."""

LOCAL = "local"
"""The `host` of a node that is this machine."""

OWN_VARIABLES = (
    "TF_CONFIG",
    "TF_GRPC_REUSE_PORT",
    "DISTLAUNCH_RUN_ID",
    "DISTLAUNCH_TASK",
    "DISTLAUNCH_ATTEMPT",
)
"""Environment variables that distlaunch sets itself."""

Text = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00]*$"),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:@%\[\]-]+$", max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PortRange(_Model):
    """An inclusive range of TCP ports; written `20000-20999`."""

    first: Port
    last: Port

    @model_validator(mode="after")
    def _is_ordered(self) -> PortRange:
        if self.first > self.last:
            raise PydanticCustomError("port_range", "the range ends before it begins; write the smaller port first")
        return self

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def parse_port_range(value: Any) -> Any:
    """`20000-20999` or `20000` → the fields of a PortRange; other values go through to the model."""
    if not isinstance(value, (str, int)):
        return value
    match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", str(value))
    if match is None:
        raise PydanticCustomError("port_range", "expected a range of ports; write it like 20000-20999")
    return {"first": int(match[1]), "last": int(match[2] or match[1])}


class NodeSpec(_Model):
    """One machine of the cluster."""

    host: HostName
    """How this machine reaches it; `local` is this machine itself."""
    address: HostName | None = None
    """The name or address that the other workers dial, when it differs from `host`."""
    tasks: Annotated[dict[TaskType, Annotated[int, Field(ge=0, le=100_000)]], Field(min_length=1)] = {"worker": 1}
    """How many tasks of each type run here."""
    port: Port | None = None
    """The port of the first task here; the next tasks get the next ports. Without it, free ones of `ports`."""
    gpus: list[Text] | None = None
    """The GPUs that the tasks here share out, as CUDA_VISIBLE_DEVICES names them; without it, all of them."""
    gpus_per_worker: Annotated[int, Field(ge=1)] | None = None
    """GPUs for each training task here; without it, an equal share."""
    python: Text | None = None
    """The Python interpreter to use on this node."""
    env: dict[VariableName, Text] = {}
    """Environment variables of the tasks here, over those of the cluster."""

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL


class ProgramSpec(_Model):
    """What every task runs: exactly one of `script`, `module` and `command`."""

    script: Text | None = None
    """A Python script, relative to the working directory."""
    module: Text | None = None
    """A Python module, run as `python -m` does."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Any other program with its arguments; run as it is, without a shell."""
    args: list[Text] = []
    """Arguments of the script or module."""

    @model_validator(mode="after")
    def _is_one(self) -> ProgramSpec:
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            what = "only one of them" if given else "one of them"
            raise PydanticCustomError("program", f"a program is a `script:`, a `module:` or a `command:`; give {what}")
        if self.command is not None and self.args:
            raise PydanticCustomError("program", "a command has its arguments in `command:`; leave `args:` out")
        return self


class KerasSpec(_Model):
    """How Keras 3 is treated."""

    mend: bool = True
    """Whether to mend Keras 3, whose `model.fit` fails with more than one worker."""


class RestartSpec(_Model):
    """What happens after a failure."""

    max_restarts: Annotated[int, Field(ge=0, le=0)] = 0
    """How often the whole cluster is started again. This version knows no restarts: 0 is the only value."""


class TimeoutsSpec(_Model):
    """How long things may take, in seconds."""

    start_s: Seconds = 600.0
    """From the start until every task has opened its port; 0 waits for ever."""
    stop_grace_s: Seconds = 10.0
    """From TERM to KILL when the user stops the run."""
    drain_s: Seconds = 300.0
    """How long the other training tasks may go on after the first has ended well; 0 waits for ever."""


class ClusterSpec(_Model):
    """A cluster and the program that it runs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "cluster"
    """Names the run's files."""
    nodes: Annotated[list[NodeSpec], Field(min_length=1)]
    """The machines, in the order in which tasks are numbered."""
    program: ProgramSpec = ProgramSpec(module=DEMO_MODULE)
    """What every task runs; the built-in demo, if left out."""
    strategy: Literal["multi_worker_mirrored"] = "multi_worker_mirrored"
    """The tf.distribute strategy that the program uses."""
    working_directory: Text | None = None
    """Where the program runs; without it, the folder that distlaunch is called in."""
    env: dict[VariableName, Text] = {}
    """Environment variables of every task."""
    env_from: list[VariableName] = []
    """Variables that are taken from distlaunch's own environment, and never shown."""
    ports: Annotated[
        PortRange,
        BeforeValidator(parse_port_range),
        WithJsonSchema(
            {"type": ["string", "integer"], "pattern": r"^\d{1,5}(-\d{1,5})?$", "examples": ["20000-20999"]}
        ),
    ] = PortRange(first=20000, last=20999)
    """The range out of which each node takes free ports."""
    keras: KerasSpec = KerasSpec()
    restart: RestartSpec = RestartSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> ClusterSpec:
        problems = [*_contradictions(self)]
        if problems:
            text = "; ".join(f"{render_path(path)}: {message}" for path, message in problems)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "problems": problems})
        return self

    def placements(self) -> Iterator[tuple[NodeSpec, TaskId]]:
        """Every task with its node; indices count through the nodes in their order."""
        counts: dict[TaskType, int] = dict.fromkeys(TASK_TYPES, 0)
        for node in self.nodes:
            for task_type in TASK_TYPES:
                for _ in range(node.tasks.get(task_type, 0)):
                    yield node, TaskId(task_type, counts[task_type])
                    counts[task_type] += 1


Path = tuple[str | int, ...]


def render_path(path: Path) -> str:
    """`("nodes", 1, "port")` → `nodes[1].port`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    totals = {task_type: sum(n.tasks.get(task_type, 0) for n in spec.nodes) for task_type in TASK_TYPES}
    yield from _role_contradictions(spec, totals)
    yield from _node_contradictions(spec)
    for name in OWN_VARIABLES:
        for path, env in [
            (("env",), spec.env),
            *((("nodes", i, "env"), n.env) for i, n in enumerate(spec.nodes)),
        ]:
            if name in env:
                yield (*path, name), "is set by distlaunch for each task; leave it out"
        if name in spec.env_from:
            yield (
                ("env_from", spec.env_from.index(name)),
                f"{name} is set by distlaunch for each task; leave it out",
            )


def _role_contradictions(spec: ClusterSpec, totals: dict[TaskType, int]) -> Iterator[tuple[Path, str]]:
    if not any(totals[task_type] for task_type in TRAINING_TYPES):
        yield ("nodes",), "no task trains; give at least one node `tasks: {worker: 1}`"
    for index, node in enumerate(spec.nodes):
        for task_type in ("chief", "evaluator"):
            if totals[task_type] > 1 and node.tasks.get(task_type, 0):
                yield (
                    ("nodes", index, "tasks", task_type),
                    f"a cluster has at most one {task_type}; this one has {totals[task_type]}",
                )
        if node.tasks.get("ps", 0):
            yield (
                ("nodes", index, "tasks", "ps"),
                f"strategy {spec.strategy} has no parameter servers; leave `ps` out",
            )
        if not sum(node.tasks.values()):
            yield ("nodes", index, "tasks"), "this node has no task; leave the node out"


def _node_contradictions(spec: ClusterSpec) -> Iterator[tuple[Path, str]]:
    hosts: dict[str, int] = {}
    taken: dict[tuple[str, int], TaskId] = {}
    tasks_of: dict[str, list[TaskId]] = {}
    for node, task in spec.placements():
        tasks_of.setdefault(node.host, []).append(task)
    for index, node in enumerate(spec.nodes):
        if node.host in hosts:
            yield (
                ("nodes", index, "host"),
                f"{node.host} is nodes[{hosts[node.host]}] already; give that node all of its tasks",
            )
            continue
        hosts[node.host] = index
        tasks = tasks_of.get(node.host, [])
        if node.port is not None:
            if node.port + len(tasks) - 1 > 65535:
                yield (
                    ("nodes", index, "port"),
                    f"{len(tasks)} tasks from port {node.port} on go beyond 65535; start lower",
                )
            for port, task in enumerate(tasks, node.port):
                owner = taken.setdefault((node.address or node.host, port), task)
                if owner != task:
                    yield (
                        ("nodes", index, "port"),
                        f"{port} is already used by {owner} on the same node; choose another port",
                    )
                    break
        elif len(tasks) > len(spec.ports):
            yield (
                ("ports",),
                f"{len(spec.ports)} ports are too few for the {len(tasks)} tasks of {node.host}; widen the range",
            )
        trainers = sum(task.trains for task in tasks)
        if node.gpus is not None and len(set(node.gpus)) != len(node.gpus):
            yield ("nodes", index, "gpus"), "a GPU is named twice; name each once"
        if (
            node.gpus is not None
            and node.gpus_per_worker is not None
            and node.gpus_per_worker * trainers > len(node.gpus)
        ):
            wanted = node.gpus_per_worker * trainers
            yield (
                ("nodes", index, "gpus_per_worker"),
                f"{trainers} workers would need {wanted} GPUs, `gpus:` names {len(node.gpus)}; lower it",
            )
    if len(spec.nodes) > 1:
        for index, node in enumerate(spec.nodes):
            if node.is_local and node.address is None:
                yield (
                    ("nodes", index, "host"),
                    "other machines cannot dial `local`; add `address:`, by which they reach this machine",
                )
