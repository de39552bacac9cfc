"""The known facts about one attempt: a frozen value, which `decide` replaces at every event."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from launcher.gang.divergence import Digests
from launcher.gang.events import (
    EndAnnounced,
    NodeBusy,
    NodeEmpty,
    NodeRefused,
    NodeSignalled,
    ProgramEnded,
    TaskExited,
    TaskHalted,
    TaskListening,
    TaskReported,
    TaskStarted,
)
from launcher.gang.policy import AttemptPolicy
from launcher.spec.strategies import SEPARATE_CLASSES
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.strategy_names import JAX, NO_STRATEGY
from worker_entry.protocol.values import HAS_IMPORTED, Activity, Progress, TaskExit

SAVED_STATUSES = (42, 143)
"""PreemptionCheckpointHandler's exit statuses, which depend on the machine: the workers save, and exit with them."""


class Phase(enum.Enum):
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    SYNCING = "syncing"
    PREPARING = "preparing"
    CHECKING = "checking"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


BEFORE_START = (Phase.CONNECTING, Phase.CLAIMING, Phase.SYNCING, Phase.PREPARING, Phase.CHECKING)


class Reason(enum.Enum):
    """Why the attempt is being stopped, or has ended."""

    SUCCEEDED = "succeeded"
    TASK_FAILED = "task-failed"
    REFUSED = "refused"
    NODE_LOST = "node-lost"
    GPUS_BUSY = "gpus-busy"
    START_TIMEOUT = "start-timeout"
    STALLED = "stalled"
    DRAIN_TIMEOUT = "drain-timeout"
    INTERRUPTED = "interrupted"
    CHECKED = "checked"
    ANNOUNCED = "announced"


def make_exit(program: ProgramEnded) -> TaskExited:
    """The end of a task whose program has ended, as if its interpreter ended at once."""
    crash = program.crash
    if crash is None:
        return TaskExited(program.task, TaskExit(0), program.time, finished=program.time, start=program.start)
    return TaskExited(program.task, TaskExit(crash.exit_status or 1), program.time, crash, start=program.start)


@dataclass(frozen=True)
class IndividualRestart:
    """The end of a task that restarted individually, and its last status before."""

    exited: TaskExited
    status: TaskReported | None


@dataclass(frozen=True)
class AttemptState:
    """One attempt so far."""

    policy: AttemptPolicy
    phase: Phase = Phase.CONNECTING
    ready: frozenset[str] = frozenset()
    ports: Mapping[TaskId, int] = field(default_factory=dict)
    unguarded: Mapping[TaskId, str] = field(default_factory=dict)
    """Why unknown peers can reach a port; all others are guarded."""
    asked: frozenset[str] = frozenset()
    """The nodes that have been asked to keep GPUs for the run, and have not answered."""
    claimed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The GPUs that each node keeps for the run."""
    lacking: Mapping[str, NodeBusy] = field(default_factory=dict)
    """The nodes that have reported too few free GPUs since all nodes were last asked."""
    lacked: Mapping[str, NodeBusy] = field(default_factory=dict)
    """The value of `lacking` when all nodes had last answered: what the run waits for."""
    claims_again: float | None = None
    """When all nodes are asked again, on the controller's monotonic clock; None while answers are awaited."""
    claims_due: float | None = None
    """When the run stops waiting for GPUs, on the controller's monotonic clock; None: no limit."""
    synced: frozenset[str] = frozenset()
    restored: frozenset[str] = frozenset()
    """The nodes that have the last checkpoint."""
    prepared: frozenset[str] = frozenset()
    inspected: frozenset[str] = frozenset()
    detached: frozenset[str] = frozenset()
    """The nodes of an earlier controller's attempt whose agents this controller has yet to take over."""
    unheard: frozenset[str] = frozenset()
    """The nodes whose connection is broken at the moment."""
    started: Mapping[TaskId, TaskStarted] = field(default_factory=dict)
    listening: Mapping[TaskId, TaskListening] = field(default_factory=dict)
    not_joined: frozenset[TaskId] | None = None
    """The tasks that have not joined the leader yet, according to its log; None if unknown."""
    status: Mapping[TaskId, TaskReported] = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)
    """The last digests of each task's model."""
    divergence: str = ""
    """The line that says where the tasks' models first differed."""
    halted: Mapping[TaskId, TaskHalted] = field(default_factory=dict)
    """The tasks that a signal has stopped and that had not continued when we stopped the attempt."""
    last_progress: float | None = None
    """When the cluster last made progress, on the controller's monotonic clock."""
    suspicion: Reason | None = None
    """Why the attempt will be stopped, unless it makes progress, once all tasks have reported what they are doing."""
    stalled_s: float = 0.0
    """How long there had been no progress when the suspicion arose."""
    stacks: Mapping[TaskId, str] = field(default_factory=dict)
    """The stacks that the tasks reported then."""
    activity: Mapping[TaskId, Activity] = field(default_factory=dict)
    """Whether the tasks were at work then."""
    busy: Mapping[TaskId, str] = field(default_factory=dict)
    """The tasks at work although there is no progress, each with its place, as of the last answers."""
    worked: float | None = None
    """When tasks were last seen at work although there is no progress, on the controller's monotonic clock."""
    waited: bool = False
    """Whether the last look at the tasks found that all of them wait."""
    next_look: float = 0.0
    """When the tasks are looked at again at the earliest, on the controller's monotonic clock."""
    programs: Mapping[TaskId, ProgramEnded] = field(default_factory=dict)
    """The tasks whose program has ended; their processes may still be there."""
    raised_due: float | None = None
    """When a task whose program has raised counts as failed although its process stays, on the controller's clock."""
    exits: Mapping[TaskId, TaskExited] = field(default_factory=dict)
    ended: frozenset[TaskId] = frozenset()
    """The trainers in `programs` or `exits`; kept, because it is asked at each event, and there may be thousands."""
    bad_ends: frozenset[TaskId] = frozenset()
    """The tasks in `programs` or `exits` whose end may fail the attempt: trainers that failed, and servers."""
    restarted: Mapping[TaskId, tuple[IndividualRestart, ...]] = field(default_factory=dict)
    """The tasks that restarted individually."""
    refusals: tuple[NodeRefused, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, NodeEmpty] = field(default_factory=dict)
    reason: Reason | None = None
    signalled: Mapping[str, NodeSignalled] = field(default_factory=dict)
    """The nodes whose processes got SIGTERM from Slurm, for a reason that Slurm has not reported yet."""
    announced: EndAnnounced | None = None
    """Why the nodes will be taken from us."""
    signal: int | None = None
    """The signal that interrupted the attempt, if one did."""
    interrupts: bool = False
    """Whether programs get SIGINT first, because the user has ended the attempt by hand."""
    interrupted: frozenset[TaskId] = frozenset()
    """The tasks whose programs are known to handle that SIGINT."""
    interrupt_due: float | None = None
    """When all others get SIGTERM, unless a task may be saving, on the controller's monotonic clock."""
    stopped: frozenset[TaskId] = frozenset()
    """The tasks that were running, or just starting, when we began to stop them."""
    deadline: float | None = None
    """When a Tick is due at the latest, on the controller's monotonic clock."""

    @property
    def saving(self) -> frozenset[TaskId]:
        """The tasks whose programs handle our SIGINT, and may need the others for it."""
        return (self.stopped & self.interrupted) - self.exits.keys() - self.programs.keys() - self.policy.auxiliary

    @property
    def is_done(self) -> bool:
        """Whether all trainers have ended, and none has failed: from then on, the attempt can only succeed."""
        return self.policy.trainers <= self.ended and all(map(self._has_succeeded, self.policy.trainers))

    def _has_succeeded(self, task: TaskId) -> bool:
        program, end = self.programs.get(task), self.exits.get(task)
        if program is not None and program.crash is None:
            return True
        return end is not None and not end.failed and task not in self.stopped

    @property
    def ended_before_stop(self) -> frozenset[TaskId]:
        """The trainers whose programs ended before anything was stopped."""
        return self.policy.trainers & (self.programs.keys() | self.exits.keys() - self.stopped)

    @property
    def raised(self) -> list[ProgramEnded]:
        """The ends of trainers whose program has raised while their process is still there."""
        return [self.programs[task] for task in sorted(self.bad_ends) if task not in self.exits]

    def needs(self, node: str) -> bool:
        """Whether the attempt fails without this node."""
        if self.phase in BEFORE_START:
            return True
        is_needed = any(
            task in self.policy.servers or (task in self.policy.trainers and task not in self.ended)
            for task in self.policy.nodes[node]
        )
        return is_needed and not self.is_done

    @property
    def seems_stalled(self) -> bool:
        """Whether the last look at the tasks found that all of them wait, or that some keep the others waiting."""
        return self.waited or bool(self.busy)

    @property
    def is_blind(self) -> bool:
        """Whether the running attempt needs a node that is not connected: what seems missing may have happened."""
        has_tasks = self.phase in (Phase.FORMING, Phase.RUNNING)
        return has_tasks and any(map(self.needs, self.unheard | self.detached))

    @property
    def unreachable(self) -> frozenset[TaskId]:
        """The tasks on lost nodes that are not known to have ended."""
        on_lost = (task for node in self.lost for task in self.policy.nodes[node])
        return frozenset(task for task in on_lost if task not in self.exits)

    @property
    def is_taken_away(self) -> bool:
        """Whether the engine takes the nodes away: it also ends the processes there that we cannot reach."""
        return self.announced is not None and not self.announced.stays

    @property
    def awaited(self) -> frozenset[str]:
        """The nodes on which the start depends."""
        if not self.policy.only_checks:
            return self.policy.hosts
        return self.policy.hosts - self.lost.keys() - {refusal.node for refusal in self.refusals}

    @property
    def is_synced(self) -> bool:
        """Whether all nodes have the files that they need."""
        has_program = self.policy.syncs & self.awaited <= self.synced
        return has_program and self.policy.restores & self.awaited <= self.restored

    @property
    def occupied(self) -> frozenset[str]:
        """The nodes that are not lost and have not reported that no process is left."""
        return frozenset(self.policy.nodes.keys() - self.empty.keys() - self.lost.keys())

    @property
    def has_met_all(self) -> bool:
        """Whether each node has answered, is lost or has refused."""
        # Called for each of a thousand nodes: counts before it makes any set.
        if len(self.ready) + len(self.lost) + len(self.refusals) < len(self.policy.nodes):
            return False
        return self.policy.hosts <= self.ready | self.lost.keys() | {refusal.node for refusal in self.refusals}

    @property
    def is_prepared(self) -> bool:
        """Whether all nodes on which the start depends have answered the last question that they were asked."""
        answered = len(self.prepared) + len(self.lost) + len(self.refusals)
        return answered >= len(self.policy.nodes) and not self.silent

    @property
    def waits_for_gpus(self) -> bool:
        """Whether it is not known yet which GPUs the tasks get."""
        is_before = self.phase in (Phase.CONNECTING, Phase.CLAIMING)
        return is_before and self.policy.wait_gpus_s is not None and not self.policy.only_checks

    @property
    def lacks_gpus(self) -> bool:
        """Whether the run waits because GPUs that it needs are not free."""
        return self.phase is Phase.CLAIMING and bool(self.lacked)

    @property
    def silent(self) -> frozenset[str]:
        """The nodes that the start waits for: they have not answered the last question to all nodes."""
        if self.phase is Phase.CLAIMING:
            return self.asked - self.lost.keys()
        waited = self.awaited - self.lost.keys()
        synced = self.synced | (waited - self.policy.syncs)
        inspected = self.inspected if self.policy.checks else waited
        steps = (waited - answered for answered in (self.ready, synced, self.prepared & inspected))
        return next(filter(None, steps), frozenset())

    @property
    def is_up(self) -> bool:
        """Whether all tasks have joined the cluster, or train without it."""
        if all(map(self._has_trained, self.policy.trainers)):
            return True
        if self._is_apart and all(map(self._needs_no_port, self.policy.trainers)):
            return True
        if len(self.listening) + len(self.exits) < len(self.policy.forming):
            return False
        is_known = self.not_joined is not None or not self.policy.forming or not self.policy.strategy.collective
        return is_known and not any(map(self._waits_for, self.policy.tasks))

    @property
    def separate(self) -> frozenset[TaskId]:
        """All training tasks, if each is known to train on its own: with a strategy of one process, or with none.

        That their ports stay closed shows nothing: a program may name other ports, or use Horovod, MPI or JAX.
        """
        apart = {*SEPARATE_CLASSES, NO_STRATEGY}
        is_separate = self._is_apart and all(self._find_strategy(task) in apart for task in self.policy.trainers)
        return self.policy.trainers if is_separate else frozenset()

    @property
    def _is_apart(self) -> bool:
        """Whether several training tasks should form one cluster, and none has opened its port."""
        trainers = self.policy.trainers
        return len(trainers) > 1 and self.policy.strategy.collective and self.listening.keys().isdisjoint(trainers)

    @property
    def progresses(self) -> list[Progress]:
        """The progress of each trainer that has reported any."""
        known = [self.status[task].progress for task in sorted(self.policy.trainers & self.status.keys())]
        return [progress for progress in known if progress is not None]

    def _needs_no_port(self, task: TaskId) -> bool:
        if self._has_trained(task):
            return True
        strategy = self._find_strategy(task)
        if strategy == JAX and self.policy.strategy.reports_joining:
            return self.status[task].phase not in HAS_IMPORTED  # until it has joined, the leader's port may still open
        return strategy in {*SEPARATE_CLASSES, NO_STRATEGY, JAX}

    def _find_strategy(self, task: TaskId) -> str:
        """What the task has reported; empty: nothing yet."""
        return self.status[task].strategy if task in self.status else ""

    def _has_trained(self, task: TaskId) -> bool:
        """Whether the task has reported a step."""
        progress = self.status[task].progress if task in self.status else None
        return progress is not None and progress.first_step is not None

    @property
    def is_over(self) -> bool:
        """Whether all tasks that end on their own have ended successfully."""
        rest = self.policy.tasks - self.policy.servers - self.policy.auxiliary
        return self.phase is Phase.RUNNING and self.have_ended(rest) and not (self.failures or self.raised)

    def have_ended(self, tasks: frozenset[TaskId]) -> bool:
        """Whether each of these tasks is known to have ended, or cannot be reached."""
        unreachable = self.unreachable
        return all(task in self.exits or task in unreachable for task in tasks)

    @property
    def have_started(self) -> bool:
        """Whether each task has started, or cannot be reached."""
        unreachable = self.unreachable
        return all(task in self.started or task in unreachable for task in self.policy.tasks)

    @property
    def is_empty(self) -> bool:
        """Whether each node that has answered is lost, or has reported that no process is left."""
        return all(node in self.empty or node in self.lost for node in self.ready)

    @property
    def failures(self) -> list[TaskExited]:
        """The ends of tasks without which the cluster cannot continue."""
        if not self.bad_ends:
            return []
        return [event for event in self.exits.values() if event.task in self.bad_ends and self.fails(event)]

    def has_saved(self, event: TaskExited) -> bool:
        """Whether the task ended because PreemptionCheckpointHandler has saved; the other workers save as well."""
        status = self.status.get(event.task)
        return event.exit.code in SAVED_STATUSES and status is not None and status.saves_when_preempted

    def fails(self, event: TaskExited) -> bool:
        """Whether the end of a task fails the attempt, unless the task was stopped."""
        if event.task in self.policy.servers:  # a server has to serve until the program ends
            return not self.is_done
        return event.task in self.policy.trainers and event.failed

    @property
    def missing(self) -> list[TaskId]:
        """The tasks that the cluster waits for: their port is not open, or they have not joined the leader.

        Once the attempt is stopped, the tasks for which it waited then.
        """
        return sorted(filter(self._waits_for, self.policy.tasks))

    def _waits_for(self, task: TaskId) -> bool:
        if task in self.exits and task not in self.stopped:
            return False
        has_joined = task in self.listening and task not in (self.not_joined or ())
        return (task in self.policy.forming and not has_joined) or self._is_silent(task)

    def _is_silent(self, task: TaskId) -> bool:
        """Whether the task is a trainer that should report that it joins the cluster, and has not.

        A script always reports; a command is known to do so once it has reported anything.
        """
        if not self.policy.strategy.reports_joining or task not in self.policy.trainers:
            return False
        reports = task in self.policy.scripts or task in self.status
        return reports and not self._find_strategy(task) and not self._has_trained(task)
