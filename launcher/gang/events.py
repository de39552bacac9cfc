"""What a gang can be told, and what it can ask for. `at` is seconds of the controller's monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.tasks import TaskId
from worker_entry.protocol.values import Activity, CrashRecord, KerasPatch, Problem, Progress, TaskExit


@dataclass(frozen=True)
class NodeReady:
    """The node's agent has answered."""

    node: str


@dataclass(frozen=True)
class NodeSynced:
    """The program's folder is on the node; `fetched` bytes in `files` files were not there before."""

    node: str
    files: int
    fetched: int


@dataclass(frozen=True)
class NodePrepared:
    """The node has checked its programs and holds these ports."""

    node: str
    ports: Mapping[TaskId, int]


@dataclass(frozen=True)
class NodeInspected:
    """The node has looked at itself, and has left its mark in the checkpoint directory."""

    node: str


@dataclass(frozen=True)
class Checked:
    """All nodes have been looked at, and nothing keeps the cluster from being started."""


@dataclass(frozen=True)
class NodeRefused:
    """The node cannot start its tasks, or cannot go on."""

    node: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class NodeLost:
    """We no longer know what happens on the node."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeEmpty:
    """No process of the attempt is left on the node."""

    node: str
    left_behind: int = 0
    killed: int = 0


@dataclass(frozen=True)
class TaskStarted:
    task: TaskId
    pid: int
    time: float


@dataclass(frozen=True)
class TaskListening:
    """The task's port is open."""

    task: TaskId
    time: float


@dataclass(frozen=True)
class LeaderWaits:
    """The tasks that the cluster's leader has not heard of yet, as it said last; None if it has said nothing."""

    tasks: frozenset[TaskId] | None


@dataclass(frozen=True)
class TaskReported:
    """How far the task's program has come, as a phrase that goes on from its name, and since when.

    `injected`: the faults of `--chaos` that were done to it. `strategy`: the class of the tf.distribute strategy that
    it has built. `own_tf_config`: the line by which it sets a TF_CONFIG of its own. `keras`: what was patched, once it
    trains with Keras.
    """

    task: TaskId
    phase: str
    since: float
    progress: Progress | None = None
    injected: tuple[str, ...] = ()
    strategy: str = ""
    own_tf_config: str = ""
    own_tf_config_kept: bool = False
    keras: KerasPatch | None = None

    @property
    def stepping(self) -> Progress | None:
        """How far it is, if it is in the middle of training and has done a step."""
        progress = self.progress
        return progress if progress is not None and progress.training and progress.first_step else None


@dataclass(frozen=True)
class TaskWrote:
    """The task's log has grown."""

    task: TaskId


@dataclass(frozen=True)
class TaskHalted:
    """A signal has stopped the task, as SIGSTOP does; None: it goes on."""

    task: TaskId
    signal: int | None
    time: float


@dataclass(frozen=True)
class TaskExited:
    task: TaskId
    exit: TaskExit
    time: float
    crash: CrashRecord | None = None
    finished: float | None = None
    """When the program came to its end, as far as that is known, whatever its interpreter did afterwards."""
    evidence: Problem | None = None
    """What its node adds: a disk that is full, a kernel that was out of memory."""

    @property
    def failed(self) -> bool:
        """Whether the program failed; an interpreter that fails once the program has come to its end is no matter."""
        return not self.exit.ok and self.finished is None


@dataclass(frozen=True)
class Interrupted:
    """The user (or the system) asks us to end; `signal` by its number."""

    signal: int


@dataclass(frozen=True)
class StacksAsked:
    """The user wants to know what all tasks are doing; it changes nothing."""


@dataclass(frozen=True)
class StacksReceived:
    """What all tasks are doing, as faulthandler has it, empty for those that have not said; and whether they work."""

    texts: Mapping[TaskId, str]
    activity: Mapping[TaskId, Activity] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick:
    """Nothing happened; time has passed."""


Event = (
    NodeReady
    | NodeSynced
    | NodePrepared
    | NodeInspected
    | Checked
    | NodeRefused
    | NodeLost
    | NodeEmpty
    | TaskStarted
    | TaskListening
    | LeaderWaits
    | TaskHalted
    | TaskReported
    | TaskWrote
    | TaskExited
    | Interrupted
    | StacksAsked
    | StacksReceived
    | Tick
)


# --- actions ---


@dataclass(frozen=True)
class SyncNodes:
    """Offer the program's folder to the nodes that it is sent to."""


@dataclass(frozen=True)
class PrepareNodes:
    """Ask every node to check its programs and to hold its ports."""


@dataclass(frozen=True)
class CheckNodes:
    """Have every node dial all others on the ports that they hold."""


@dataclass(frozen=True)
class StartTasks:
    """Start every task, with these ports."""

    ports: Mapping[TaskId, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartTask:
    """Start this one task again, on the same node and port, while the others go on."""

    task: TaskId


@dataclass(frozen=True)
class AskStacks:
    """Have all tasks say what they are doing."""


@dataclass(frozen=True)
class StopNodes:
    """TERM now, KILL after the grace, on every node that is not empty; a shorter grace replaces a longer one."""

    grace_s: float


@dataclass(frozen=True)
class Finish:
    """The attempt is over: nothing is left, or what is left cannot be reached."""


Action = SyncNodes | PrepareNodes | CheckNodes | StartTasks | RestartTask | AskStacks | StopNodes | Finish
