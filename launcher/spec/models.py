"""The cluster spec as frozen values; `loading` reads them from YAML.

Every scalar of a spec file arrives as the text in the file, and the field's type decides what it means: `args: [3]` is
the text "3", and `env: {DEBUG: no}` is the text "no".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from launcher.spec.contradictions import find_contradictions, render_path
from launcher.spec.fields import (
    AtMost,
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
from launcher.spec.nodes import SLURM, MayBeListed, Nodes, NodeSpec, Source
from launcher.spec.parts import (
    KerasSpec,
    Model,
    NotifySpec,
    ProgramSpec,
    RestartSpec,
    SlurmSpec,
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


class ClusterSpec(Model):
    """A cluster and the program that it runs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "cluster"
    """The cluster's name; part of each run's name."""
    nodes: Annotated[list[NodeSpec], Field(min_length=1), MayBeListed()]
    """The machines, in the order in which tasks are numbered; or a command that names them; or `slurm`, the nodes of
    the Slurm job that distlaunch runs in."""
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
    cache: Annotated[str, StringConstraints(pattern=r"^(~/|/)[^\x00\s'\"]*$")] | None = None
    """A folder on each node, which may be shared, where code that XLA or PyTorch has compiled is kept for later
    runs."""
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
    there, or by `openssh`, the user's own `ssh`; in running containers by `docker`; in steps of a `slurm` job; or by a
    program of your own."""
    slurm: SlurmSpec = SlurmSpec()
    ssh: SshSpec = SshSpec()
    host_keys: Literal["strict", "accept-new"] = "strict"
    """Whether to refuse a host key that is not in known_hosts, or to accept it and add it there."""
    check_speed: bool = False
    """Measures nodes and links before the first start, as `check --speed` does, and warns of what is slow."""
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
    keep_warm_s: Annotated[float, Field(ge=0), AtMost(86_400, "nodes should not be held for longer")] = 0.0
    """How long each node keeps TensorFlow imported after the run, in seconds, so that the next one starts at once; 0:
    not."""
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
    def source(self) -> Source | None:
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
    def shares_files(self) -> bool:
        """Whether the run's files are the same on all nodes: on one machine, and by custom in a Slurm cluster."""
        return all(node.is_local or node.way == SLURM for node in self.nodes)

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

    def tasks_for(self, workers: int, index: int) -> dict[TaskType, int]:
        """The tasks of the node at this place, if each has so many workers: the first has what else is needed."""
        tasks: dict[TaskType, int] = {"worker": workers}
        return tasks if index or self.strategy != "parameter_server" else {**tasks, "chief": 1, "ps": 1}

    def placements(self) -> Iterator[tuple[NodeSpec, TaskId]]:
        """Every task with its node; indices count through the nodes in order."""
        counts: dict[TaskType, int] = dict.fromkeys(TASK_TYPES, 0)
        for node in self.nodes:
            for task_type in TASK_TYPES:
                for _ in range(node.count(task_type)):
                    yield node, TaskId(task_type, counts[task_type])
                    counts[task_type] += 1
