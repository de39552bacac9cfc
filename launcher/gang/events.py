"""The events that `decide` takes, and the actions that it returns. Times are Unix seconds of the controller's clock."""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping

from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.gpus import BusyGpu
from worker_entry.protocol.values import Activity, CrashRecord, KerasPatch, ModelDigest, Problem, Progress, TaskExit


@dataclass(frozen=True)
class NodeReady:
    """The node's agent has answered."""

    node: str


@dataclass(frozen=True)
class NodeClaimed:
    """The node keeps these GPUs for the run, as CUDA_VISIBLE_DEVICES names them; they are all that the run needs."""

    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class NodeBusy:
    """The node keeps no GPU for the run, because too few are free: these are not."""

    node: str
    gpus: tuple[BusyGpu, ...]


@dataclass(frozen=True)
class NodeSynced:
    """The program's folder is on the node, or with `checkpoint` the last checkpoint of the run.

    `fetched` bytes in `files` files were not there before. `newer`: the node has kept newer checkpoints.
    """

    node: str
    files: int
    fetched: int
    checkpoint: bool = False
    newer: bool = False


@dataclass(frozen=True)
class NodePrepared:
    """The node has checked its programs and holds these ports; `unguarded`: why unknown peers can reach some."""

    node: str
    ports: Mapping[TaskId, int]
    unguarded: Mapping[TaskId, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeInspected:
    """The node has inspected itself, and has left its mark in the checkpoint directory."""

    node: str


@dataclass(frozen=True)
class Checked:
    """All nodes were checked, and nothing keeps the cluster from starting."""


@dataclass(frozen=True)
class NodeRefused:
    """The node cannot start its tasks, or cannot continue."""

    node: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class NodeLost:
    """We no longer know what happens on the node."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeUnheard:
    """The connection to the node is broken: until NodeHeard or NodeLost, nobody knows what its tasks do."""

    node: str


@dataclass(frozen=True)
class NodeHeard:
    """The node is connected again; what has happened there meanwhile is reported next."""

    node: str


@dataclass(frozen=True)
class NodeAttached:
    """This controller has taken over the node's agent from an earlier controller."""

    node: str


@dataclass(frozen=True)
class NodeEmpty:
    """No process of the attempt is left on the node."""

    node: str
    left_behind: int = 0
    killed: int = 0


@dataclass(frozen=True)
class TaskStarted:
    """The task's own process runs; `start`: how often the task has been started in this attempt."""

    task: TaskId
    pid: int
    time: float
    start: int = 1


@dataclass(frozen=True)
class TaskListening:
    """The task's port is open."""

    task: TaskId
    time: float


@dataclass(frozen=True)
class TaskUnguarded:
    """Unknown peers can reach the task's port after all."""

    task: TaskId
    why: str


@dataclass(frozen=True)
class LeaderWaits:
    """The tasks that have not joined yet, as the cluster's leader last reported; None if it has reported nothing."""

    tasks: frozenset[TaskId] | None


@dataclass(frozen=True)
class TaskReported:
    """What the task's program is doing, as a phrase that follows the task's name, and since when.

    `injected`: the faults of `--chaos` that the task has had. `strategy`: the class of the tf.distribute strategy that
    the program has built. `own_tf_config`: the line that sets a TF_CONFIG of its own. `own_resolver`: a cluster
    resolver that does not find this cluster, and its line. `keras`: what was patched, once the program trains with
    Keras. `model`: a new digest of its model. `saves_when_preempted`: whether the program has built a
    PreemptionCheckpointHandler.
    """

    task: TaskId
    phase: str
    since: float
    progress: Progress | None = None
    injected: tuple[str, ...] = ()
    strategy: str = ""
    own_tf_config: str = ""
    own_tf_config_kept: bool = False
    own_resolver: str = ""
    keras: KerasPatch | None = None
    model: ModelDigest | None = None
    saves_when_preempted: bool = False

    @property
    def stepping(self) -> Progress | None:
        """The progress of a task in the middle of training that has done a step; None for any other task."""
        progress = self.progress
        trains = progress is not None and progress.training and progress.first_step is not None
        return progress if trains else None


@dataclass(frozen=True)
class TaskWrote:
    """The task's log has grown."""

    task: TaskId


@dataclass(frozen=True)
class TaskHalted:
    """A signal has stopped the task, as SIGSTOP does; None: the task continues."""

    task: TaskId
    signal: int | None
    time: float


@dataclass(frozen=True)
class ProgramEnded:
    """The task's program has ended, with this exception or successfully; its process may still be there."""

    task: TaskId
    time: float
    crash: CrashRecord | None = None
    start: int = 1
    """As in TaskStarted."""


@dataclass(frozen=True)
class TaskExited:
    task: TaskId
    exit: TaskExit
    time: float
    crash: CrashRecord | None = None
    finished: float | None = None
    """When the program ended, if that is known, whatever its interpreter did afterwards."""
    evidence: Problem | None = None
    """The node's evidence for the cause of a failure: a full disk, or the kernel's OOM killer."""
    start: int = 1
    """As in TaskStarted."""
    before_stop: bool = False
    """Whether the program or the process had ended before its agent began to stop it."""

    @property
    def failed(self) -> bool:
        """Whether the program failed; an interpreter that fails after the end of the program does not count."""
        return not self.exit.ok and self.finished is None


@dataclass(frozen=True)
class Interrupted:
    """The user (or the system) interrupts the run; `signal` is the number of the signal.

    `asked`: whether the user has asked this controller to stop, with `distlaunch down` or a key.
    """

    signal: int
    asked: bool = False

    @property
    def is_by_hand(self) -> bool:
        """Whether the user interrupts the run by hand: programs then get SIGINT, as if run in the user's terminal."""
        return self.asked or self.signal == signals.SIGINT


@dataclass(frozen=True)
class TaskInterrupted:
    """The task's program is known to handle the SIGINT that we sent."""

    task: TaskId


@dataclass(frozen=True)
class NodeSignalled:
    """Slurm has sent SIGTERM to all of our processes on the node; it will report why, and when SIGKILL follows."""

    node: str
    time: float


@dataclass(frozen=True)
class EndAnnounced:
    """The engine that allocated the nodes explains a signal, or announces that it takes nodes away.

    `reference`: the class of the failure, `interrupted`, or empty if there is no explanation. `grace_s`: how long the
    tasks may still run. `stays`: whether we keep the nodes, because the engine has only ended what ran there.
    `replaced`: whether the engine replaces the nodes at once. `node`: the node that it takes away, if not all.
    """

    reference: str
    message: str = ""
    evidence: tuple[str, ...] = ()
    grace_s: float = 0.0
    stays: bool = False
    replaced: bool = False
    node: str = ""


@dataclass(frozen=True)
class StacksAsked:
    """The user asks what all tasks are doing; the state does not change.

    `shows`: whether the answers are shown in the terminal of the run.
    """

    shows: bool = True


@dataclass(frozen=True)
class ProfileAsked:
    """The user asks for a profile of all tasks; the state does not change."""

    duration_s: float


@dataclass(frozen=True)
class FilesAsked:
    """The user asks for files that tasks have written so far, by pattern; the state does not change."""

    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class StacksReceived:
    """faulthandler's output for every task, empty for tasks that have not answered, and whether each is at work."""

    texts: Mapping[TaskId, str]
    activity: Mapping[TaskId, Activity] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick:
    """Nothing happened; time has passed."""


Fact = (
    NodeReady
    | NodeClaimed
    | NodeSynced
    | NodePrepared
    | NodeInspected
    | Checked
    | NodeRefused
    | NodeLost
    | NodeAttached
    | NodeEmpty
    | TaskStarted
    | TaskListening
    | TaskUnguarded
    | LeaderWaits
    | TaskHalted
    | TaskReported
    | ProgramEnded
    | TaskExited
    | Interrupted
    | TaskInterrupted
    | NodeSignalled
    | EndAnnounced
    | StacksReceived
)
"""An event that the journal records if the event changes the state."""
Event = Fact | NodeBusy | NodeUnheard | NodeHeard | TaskWrote | StacksAsked | ProfileAsked | FilesAsked | Tick


# --- actions ---


@dataclass(frozen=True)
class ClaimNodes:
    """Ask every node to keep the GPUs that its tasks need."""


@dataclass(frozen=True)
class ReleaseNodes:
    """Tell every node to keep no GPU."""


@dataclass(frozen=True)
class SyncNodes:
    """Offer the program's folder and the last checkpoint to the nodes that they are sent to."""


@dataclass(frozen=True)
class PrepareNodes:
    """Ask every node to check its programs and to hold its ports."""


@dataclass(frozen=True)
class CheckNodes:
    """Make the nodes dial each other on the ports that they hold."""


@dataclass(frozen=True)
class StartTasks:
    """Start every task, with these ports."""

    ports: Mapping[TaskId, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartTask:
    """Start this one task again, on the same node and port, while the others continue."""

    task: TaskId


@dataclass(frozen=True)
class AskStacks:
    """Ask all tasks what they are doing."""


@dataclass(frozen=True)
class StopNodes:
    """SIGTERM now, SIGKILL after the grace; a later order can only shorten it. The rest is as in the order Stop."""

    grace_s: float
    for_handlers: bool = False
    interrupts: bool = False
    longer: Mapping[TaskId, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finish:
    """The attempt is over: nothing is left, or what is left cannot be reached."""


Action = (
    ClaimNodes
    | ReleaseNodes
    | SyncNodes
    | PrepareNodes
    | CheckNodes
    | StartTasks
    | RestartTask
    | AskStacks
    | StopNodes
    | Finish
)
