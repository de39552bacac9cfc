"""What is known of one attempt: a frozen value, which `gang.decide` makes anew with every event."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from launcher.gang.events import (
    NodeEmpty,
    NodeRefused,
    TaskExited,
    TaskHalted,
    TaskListening,
    TaskReported,
    TaskStarted,
)
from launcher.spec.strategies import RULES, SEPARATE_CLASSES, StrategyRules
from launcher.tasks import TaskId
from worker_entry.protocol.values import NOT_IMPORTED, Activity


class Phase(enum.Enum):
    CONNECTING = "connecting"
    SYNCING = "syncing"
    PREPARING = "preparing"
    CHECKING = "checking"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


ALONE_STRATEGIES = (*SEPARATE_CLASSES, "jax")
"""What a program may train with that ignores TF_CONFIG; JAX by the name that its tasks report."""
BEFORE_START = (Phase.CONNECTING, Phase.SYNCING, Phase.PREPARING, Phase.CHECKING)


class Reason(enum.Enum):
    """Why the attempt is being stopped, or has ended."""

    SUCCEEDED = "succeeded"
    TASK_FAILED = "task-failed"
    REFUSED = "refused"
    NODE_LOST = "node-lost"
    START_TIMEOUT = "start-timeout"
    STALLED = "stalled"
    DRAIN_TIMEOUT = "drain-timeout"
    INTERRUPTED = "interrupted"
    CHECKED = "checked"


@dataclass(frozen=True)
class AttemptPolicy:
    """What a gang has to know of the plan. Durations in seconds; 0 is for ever."""

    nodes: Mapping[str, frozenset[TaskId]]
    forming: frozenset[TaskId]
    """The tasks that open a port when the cluster forms."""
    start_s: float
    drain_s: float
    stop_grace_s: float
    strategy: StrategyRules = RULES["multi_worker_mirrored"]
    max_individual_restarts: int = 0
    """How often each task may be started again alone whose type may be at all."""
    keeps_auxiliary: bool = False
    """Whether what runs beside the tasks stays after their success, until the user ends it."""
    stall_s: float | None = None
    """How long a cluster that is up may go without progress; None: by how long its steps take."""
    syncs: frozenset[str] = frozenset()
    """The nodes that the program's folder is sent to."""
    checks: bool = False
    """Whether the nodes are checked before the start."""
    only_checks: bool = False
    """Whether that is all: nothing is started, and a node that cannot be used does not keep the others from it."""

    def __post_init__(self) -> None:
        # All of no tasks have ended well from the start: such an attempt would be a success that trained nothing.
        if not self.trainers:
            raise ValueError("a cluster needs a task whose end decides")

    @cached_property
    def tasks(self) -> frozenset[TaskId]:
        return frozenset().union(*self.nodes.values())

    @cached_property
    def trainers(self) -> frozenset[TaskId]:
        """The tasks that decide, which run the program."""
        return frozenset(task for task in self.tasks if task.type in self.strategy.decides)

    @cached_property
    def auxiliary(self) -> frozenset[TaskId]:
        return frozenset(task for task in self.tasks if task.is_auxiliary)

    @cached_property
    def servers(self) -> frozenset[TaskId]:
        return frozenset(task for task in self.tasks if task.type in self.strategy.serves)


@dataclass(frozen=True)
class IndividualRestart:
    """The end of a task that was started again alone, and what it had told before."""

    exited: TaskExited
    status: TaskReported | None


@dataclass(frozen=True)
class AttemptState:
    """One attempt as far as it has come."""

    policy: AttemptPolicy
    phase: Phase = Phase.CONNECTING
    ready: frozenset[str] = frozenset()
    ports: Mapping[TaskId, int] = field(default_factory=dict)
    synced: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    inspected: frozenset[str] = frozenset()
    started: Mapping[TaskId, TaskStarted] = field(default_factory=dict)
    listening: Mapping[TaskId, TaskListening] = field(default_factory=dict)
    not_joined: frozenset[TaskId] | None = None
    """The tasks that the leader has not heard of yet, as far as it says so; None if it was not looked at."""
    status: Mapping[TaskId, TaskReported] = field(default_factory=dict)
    halted: Mapping[TaskId, TaskHalted] = field(default_factory=dict)
    """The tasks that a signal has stopped, and that did not go on before we stopped the attempt."""
    last_progress: float | None = None
    """When something showed last that the cluster gets on, on the controller's monotonic clock."""
    suspicion: Reason | None = None
    """What it will be stopped for, unless it gets on, as soon as all tasks have said what they are doing."""
    stalled_s: float = 0.0
    """How long nothing had shown that it gets on, when it was suspected."""
    stacks: Mapping[TaskId, str] = field(default_factory=dict)
    """What they have said."""
    activity: Mapping[TaskId, Activity] = field(default_factory=dict)
    """Whether they were at work then."""
    busy: Mapping[TaskId, str] = field(default_factory=dict)
    """The tasks that are at work although nothing progresses, and where; they were found when last asked."""
    excused: float | None = None
    """Until when it is not suspected again because of them, on the controller's monotonic clock."""
    exits: Mapping[TaskId, TaskExited] = field(default_factory=dict)
    restarted: Mapping[TaskId, tuple[IndividualRestart, ...]] = field(default_factory=dict)
    """The tasks that were started again alone."""
    refusals: tuple[NodeRefused, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, NodeEmpty] = field(default_factory=dict)
    reason: Reason | None = None
    signal: int | None = None
    """The signal for which the attempt is stopped, if it is for one."""
    stopped: frozenset[TaskId] = frozenset()
    """The tasks that were running when we began to stop them, or were just being started."""
    deadline: float | None = None
    """When a Tick is due at the latest, on the controller's monotonic clock."""

    @property
    def awaited(self) -> frozenset[str]:
        """The nodes on which the start depends."""
        nodes = frozenset(self.policy.nodes)
        refused = {refusal.node for refusal in self.refusals}
        return nodes - self.lost.keys() - refused if self.policy.only_checks else nodes

    @property
    def silent(self) -> frozenset[str]:
        """The nodes that the start waits for: they have not answered what all were asked last."""
        waited = self.awaited - self.lost.keys()
        synced = self.synced | (waited - self.policy.syncs)
        inspected = self.inspected if self.policy.checks else waited
        steps = (waited - answered for answered in (self.ready, synced, self.prepared & inspected))
        return next(filter(None, steps), frozenset())

    @property
    def is_up(self) -> bool:
        """Whether all have joined the cluster, or train without having done so."""
        if self.separate or all(map(self._has_trained, self.policy.trainers)):
            return True
        return not self.missing and (
            self.not_joined is not None or not self.policy.forming or not self.policy.strategy.collective
        )

    @property
    def separate(self) -> frozenset[TaskId]:
        """All training tasks, if each of them trains for itself: steps are done, and no port was ever opened."""
        return (
            self.policy.trainers
            if self._is_apart and all(map(self._trains_alone, self.policy.trainers))
            else frozenset()
        )

    @property
    def never_met(self) -> bool:
        """Whether training tasks that ought to be one cluster have ended without a word of each other."""
        if not self._is_apart or self.separate:
            return False
        return any(told.phase != NOT_IMPORTED for task, told in self.status.items() if task in self.policy.trainers)

    @property
    def _is_apart(self) -> bool:
        """Whether several training tasks ought to be one cluster, and none has opened its port."""
        trainers = self.policy.trainers
        return len(trainers) > 1 and self.policy.strategy.collective and self.listening.keys().isdisjoint(trainers)

    def _trains_alone(self, task: TaskId) -> bool:
        return self._has_trained(task) or (task in self.status and self.status[task].strategy in ALONE_STRATEGIES)

    def _has_trained(self, task: TaskId) -> bool:
        """Whether the task has told of a step."""
        progress = self.status[task].progress if task in self.status else None
        return progress is not None and bool(progress.first_step)

    @property
    def is_over(self) -> bool:
        """Whether all that end by themselves have, and well."""
        rest = self.policy.tasks - self.policy.servers - self.policy.auxiliary
        return self.phase is Phase.RUNNING and rest <= self.exits.keys() and not self.broken

    @property
    def broken(self) -> bool:
        """Whether a task has ended that the cluster cannot do without."""
        return any(self.fails(event) for event in self.exits.values())

    def fails(self, event: TaskExited) -> bool:
        """Whether the end of a task is a failure of the attempt, unless it was stopped."""
        if event.task in self.policy.servers:  # who serves does so until the program has come to its end
            ended = {task for task, end in self.exits.items() if not end.failed} - self.stopped
            return not self.policy.trainers <= ended
        return event.task in self.policy.trainers and event.failed

    @property
    def missing(self) -> list[TaskId]:
        """The tasks that the cluster waits for: their port is not open, or the leader has not heard of them.

        Once stopped, those that it had to wait for.
        """
        ended = self.exits.keys() - self.stopped
        heard = self.listening.keys() - (self.not_joined or ())
        return sorted(self.policy.forming - heard - ended)
