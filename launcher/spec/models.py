"""The cluster spec: what a user writes, as frozen values. `spec_file` reads them from YAML.

Every scalar of a spec file arrives as text, just as it was written, and the field's type decides what it means: an
`args: [3]` is the text "3", an `env: {DEBUG: no}` the text "no".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from launcher.spec.contradictions import find_contradictions, render_path
from launcher.spec.fields import (
    Address,
    AtMost,
    Environment,
    FilledText,
    GpuName,
    HostName,
    Keepable,
    Port,
    PortRange,
    Ports,
    Preload,
    VariableName,
)
from launcher.spec.parts import KerasSpec, Model, ProgramSpec, RestartSpec, SshSpec, SyncSpec, TimeoutsSpec
from launcher.spec.strategies import (
    RULES,
    TORCH,
    Communication,
    CrossDevice,
    Framework,
    StrategyName,
    StrategyRules,
)
from launcher.tasks import TASK_TYPES, TaskId, TaskType

DEMO_MODULE = "worker_entry.demo.train"
"""The built-in training job, which runs when a spec names no program."""

LOCAL = "local"
"""The `host` of a node that is this machine."""
LOOPBACK = "127.0.0.1"


class NodeSpec(Model):
    """One machine of the cluster."""

    host: HostName
    """How this machine reaches it; `local` is this machine itself."""
    address: Address | None = None
    """The name or address that the other workers dial, when it differs from `host`."""
    addresses: Annotated[list[Address], Field(min_length=1)] | None = None
    """Several to choose from, instead of `address`: the first that every node reaches is used."""
    tasks: Annotated[dict[TaskType, Annotated[int, Field(ge=0)]], Field(min_length=1)] = {"worker": 1}
    """How many tasks of each type run here."""
    spare: bool = False
    """Runs no task at first, but takes the place of a node that is lost, when the cluster is started again."""
    port: Port | None = None
    """The port of the first task here; the next tasks get the next ports. Without it, free ones of `ports`."""
    gpus: list[GpuName] | None = None
    """The GPUs that the tasks here share out, as CUDA_VISIBLE_DEVICES names them, `[]` for none; without it, all."""
    gpus_per_worker: Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs")] | None = None
    """GPUs for each training task here; without it, an equal share."""
    python: FilledText | None = None
    """The Python interpreter to use on this node."""
    env: Environment = {}
    """Environment variables of the tasks here, over those of the cluster."""
    ssh: SshSpec = SshSpec()
    """How this node is reached, over what `ssh` of the cluster says."""

    def count(self, task_type: TaskType) -> int:
        """How many tasks of this type run here from the start."""
        return 0 if self.spare else self.tasks.get(task_type, 0)

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def candidates(self) -> list[str]:
        """The names or addresses by which the other tasks may reach those here."""
        if self.address is not None or self.addresses is None:
            return [self.address or (LOOPBACK if self.is_local else self.host.rpartition("@")[2])]
        return self.addresses

    @property
    def dialled(self) -> str:
        """The one of them that is used, unless the checks choose another."""
        return self.candidates[0]


class ClusterSpec(Model):
    """A cluster and the program that it runs."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")] = "cluster"
    """Names the run's files."""
    nodes: Annotated[list[NodeSpec], Field(min_length=1)]
    """The machines, in the order in which tasks are numbered."""
    program: ProgramSpec = ProgramSpec(module=DEMO_MODULE)
    """What every task runs; the built-in demo, if left out."""
    framework: Framework = "tensorflow"
    """What the program trains with; `torch` sets the variables of `torchrun` in place of TF_CONFIG."""
    strategy: StrategyName = "multi_worker_mirrored"
    """The tf.distribute strategy that the program uses."""
    devices: Annotated[int, Field(ge=1), AtMost(64, "no machine has more GPUs to emulate")] | None = None
    """Into so many devices the CPU is divided for each task that has no GPU, to emulate a machine with several."""
    communication: Communication = "auto"
    """How workers add up their gradients, for programs that let distlaunch build their strategy."""
    cross_device: CrossDevice | None = None
    """How the devices of a mirrored process do, for such programs; without it, as TensorFlow chooses."""
    working_directory: FilledText | None = None
    """Where the program runs; without it, the folder that distlaunch is called in."""
    sync: SyncSpec | None = None
    """Sends a folder to the other machines, in which the program then runs. Without it, the program must be there."""
    tensorboard: Keepable = False
    """Whether TensorBoard runs on the chief's node; with `keep` it stays after the training, until Ctrl-C."""
    log_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")] | None = None
    """What TensorBoard shows; tasks find a folder of their own below it in DISTLAUNCH_LOG_DIR. Without it, `logs` in
    `checkpoint_directory`, or, if all nodes are this machine, a folder of the run."""
    checkpoint_directory: Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$")] | None = None
    """A folder that all nodes share; checked before the start, and given to the tasks in DISTLAUNCH_CHECKPOINT_DIR."""
    env: Environment = {}
    """Environment variables of every task."""
    env_from: list[VariableName] = []
    """Variables that are taken from distlaunch's own environment, and never shown."""
    ports: Ports = PortRange(first=20000, last=20999)
    """The range out of which each node takes free ports."""
    ssh: SshSpec = SshSpec()
    host_keys: Literal["strict", "accept-new"] = "strict"
    """Whether the key of a host that is not in known_hosts is refused, or believed and written there."""
    keras: KerasSpec = KerasSpec()
    progress: bool = True
    """Whether the steps of `model.fit` are counted, which shows slow workers, and clusters that have stalled."""
    keep_own_tf_config: bool = False
    """Whether a TF_CONFIG that the program sets or removes counts; else it keeps the one of this cluster."""
    preload: Preload = True
    """Whether each node imports TensorFlow once, and forks its Python tasks from there; or what it imports besides."""
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
        """What follows from the strategy, or from the framework that has none."""
        return TORCH if self.framework == "torch" else RULES[self.strategy]

    def placements(self) -> Iterator[tuple[NodeSpec, TaskId]]:
        """Every task with its node; indices count through the nodes in their order."""
        counts: dict[TaskType, int] = dict.fromkeys(TASK_TYPES, 0)
        for node in self.nodes:
            for task_type in TASK_TYPES:
                for _ in range(node.count(task_type)):
                    yield node, TaskId(task_type, counts[task_type])
                    counts[task_type] += 1
