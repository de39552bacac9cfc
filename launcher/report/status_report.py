"""The state of a running run: what `distlaunch status --json` prints."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.state import AttemptState, Phase
from launcher.gang.watch.stragglers import Standing
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.tf_config import format_address
from launcher.report.goodput import Goodput
from launcher.report.samples import NodeUse, TaskUse
from launcher.report.state_names import RunState, StateName
from launcher.result import Result
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Progress

_PHASES: dict[Phase, StateName] = {
    Phase.FORMING: "forming",
    Phase.RUNNING: "running",
    Phase.STOPPING: "stopping",
    Phase.FINISHED: "stopping",
}
"""The run's state in these phases of an attempt; in earlier phases, the run is connecting, or waits for GPUs."""


def name_state(state: AttemptState) -> StateName:
    """The run's state during an attempt."""
    return _PHASES.get(state.phase, "waiting" if state.lacks_gpus else "connecting")


@dataclass(frozen=True)
class PlacedTask:
    """Where a task runs: the node, the address of the node, and the GPUs that the task may use."""

    task: TaskId
    node: str
    address: str
    gpus: tuple[str, ...] = ()


class TaskState(Result):
    """One task now."""

    task: str
    node: str
    state: str
    """A phrase: `training`, `exit status 1`."""
    address: str | None = None
    """The task's address in TF_CONFIG, with the port; null until it is known."""
    unguarded: str | None = None
    """Why unknown peers can reach that port; null if they cannot, or before the port is held."""
    pid: int | None = None
    """The process ID on the node."""
    epoch: int | None = None
    step: int | None = None
    """The last step done; null before the first."""
    step_s: float | None = None
    """Seconds that a recent step took."""
    own_s: float | None = None
    """The same, without the time during which the task waited for the others."""
    data_s: float | None = None
    """The part of a step during which the program waited for its input."""
    score: float | None = None
    """The others' median own time of a step, divided by the task's; null if the task was not compared."""
    slow: str = ""
    """What has been slow for some time, as a phrase: `input pipeline`, `CPU starved`, `swapping`, `own computation`."""
    total_steps: int | None = None
    """The step at which training ends; null if unknown."""
    total_epochs: int | None = None
    """The epoch at which training ends; null if unknown."""
    metrics: dict[str, float | None]
    cpu: float | None = None
    """Cores that the task uses; null before the second sample."""
    starved: float | None = None
    """Runnable threads without a core, on average; null if unknown."""
    memory: int | None = None
    """Bytes of resident memory of all processes of the task."""
    swapped: int | None = None
    """Bytes of memory of these processes in swap."""
    threads: int | None = None
    read_s: float | None = None
    """Bytes read per second, from files, pipes and sockets."""
    written_s: float | None = None
    """Bytes written per second."""
    gpus: list[str]
    """The GPUs that the task may use."""

    @property
    def waiting_s(self) -> float | None:
        """Seconds of a recent step in which the task waited for the others; None if unknown."""
        return None if self.step_s is None or self.own_s is None else max(self.step_s - self.own_s, 0.0)


class GpuState(Result):
    """One GPU of a node now; null for values that the GPU does not report."""

    gpu: str
    """The GPU's index on the node."""
    use: float | None = None
    """The share of time in which the GPU works."""
    memory: int
    """Bytes in use."""
    memory_total: int
    power_w: float | None = None
    celsius: float | None = None


class NodeState(Result):
    """One node now; the values include all of its users."""

    node: str
    cores: int
    cpu: float | None = None
    """Cores that are busy; null before the second sample."""
    memory: int
    """Bytes in use."""
    memory_total: int
    received_s: float | None = None
    """Bytes per second from the network, without the loopback."""
    sent_s: float | None = None
    """Bytes per second to the network."""
    gpus: list[GpuState]


class RunStatus(Result):
    """A run now, or at its end."""

    run_id: str
    name: str
    directory: str
    state: RunState
    attempt: int
    restarts: int
    """Restarts of the whole cluster, and of single tasks."""
    started: float
    """When the run began, in Unix seconds by the controller's clock."""
    now: float
    """When this was measured, by the same clock."""
    ended: float | None = None
    """When the run ended, or its lost controller was last known to run; null if it has a controller."""
    tasks: list[TaskState]
    nodes: list[NodeState]
    """The nodes that were measured."""
    goodput: Goodput | None = None
    """Where the time has gone so far."""
    waits_for: str = ""
    """What a pending run waits for: its job, and why Slurm has not started the job yet."""
    eta_s: float | None = None
    """Seconds until training ends, by the recent time of a step; null if the number of steps is unknown."""


def estimate_eta_s(state: AttemptState, now: float) -> float | None:
    """Seconds until all training tasks have done their last step; None if no task reports it. `now`: Unix seconds.

    Counts with the mean time of all steps since training began in this attempt. This includes the work between them
    (validation, checkpoints) and, unlike the time of the last steps, does not jump.
    """
    if state.phase is not Phase.RUNNING:
        return None
    estimates = []
    for task in state.policy.trainers - state.exits.keys():
        status = state.status.get(task)
        progress = status.stepping if status is not None else None
        if progress is not None and progress.total_steps is not None and progress.step_s is not None:
            left_s = max(progress.total_steps - progress.step, 0) * _mean_step_s(progress, progress.step_s)
            estimates.append(max(left_s - max(now - progress.time, 0.0), 0.0))
    return max(estimates, default=None)


def _mean_step_s(progress: Progress, recent_s: float) -> float:
    steps = progress.step - (progress.first_step or 0)
    return (progress.time - progress.began) / steps if steps > 0 and progress.began else recent_s


def make_task_states(
    state: AttemptState, plan: LaunchPlan, uses: Mapping[TaskId, TaskUse], standings: Mapping[TaskId, Standing]
) -> list[TaskState]:
    """All tasks of an attempt, in the plan's order."""
    return [describe_task(state, _place(task), uses.get(task.task), standings.get(task.task)) for task in plan.tasks]


def make_node_states(uses: Mapping[str, NodeUse]) -> list[NodeState]:
    """All nodes that were measured."""
    return [
        NodeState(
            node=node,
            cores=use.sample.cores,
            cpu=use.cpu,
            memory=use.sample.memory,
            memory_total=use.sample.memory_total,
            received_s=use.received_s,
            sent_s=use.sent_s,
            gpus=[GpuState(**vars(gpu)) for gpu in use.sample.gpus],
        )
        for node, use in uses.items()
    ]


def describe_task(
    state: AttemptState, plan: PlacedTask, use: TaskUse | None = None, standing: Standing | None = None
) -> TaskState:
    """One task of an attempt."""
    task = plan.task
    status, started = state.status.get(task), state.started.get(task)
    progress = status.progress if status is not None else None
    if task in state.exits:
        use = standing = None
    has_stepped = progress is not None and progress.first_step is not None
    port = state.ports.get(task)
    return TaskState(
        task=str(task),
        node=plan.node,
        state=_render_state(state, plan),
        address=format_address(plan.address, port) if port is not None else None,
        unguarded=state.unguarded.get(task),
        pid=started.pid if started is not None else None,
        epoch=progress.epoch if progress is not None else None,
        step=progress.step if progress is not None and has_stepped else None,
        step_s=progress.step_s if progress is not None else None,
        own_s=progress.own_s if progress is not None else None,
        data_s=progress.data_s if progress is not None else None,
        score=standing.score if standing is not None else None,
        slow=standing.slow if standing is not None else "",
        total_steps=progress.total_steps if progress is not None else None,
        total_epochs=progress.total_epochs if progress is not None else None,
        metrics=progress.metrics if progress is not None else {},
        cpu=use.cpu if use is not None else None,
        starved=use.starved if use is not None else None,
        memory=use.memory if use is not None else None,
        swapped=use.swapped if use is not None else None,
        threads=use.threads if use is not None else None,
        read_s=use.read_s if use is not None else None,
        written_s=use.written_s if use is not None else None,
        gpus=[*plan.gpus],
    )


def _place(plan: TaskPlan) -> PlacedTask:
    gpus = [name for name in plan.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name not in ("", "-1")]
    return PlacedTask(plan.task, plan.node, plan.address, tuple(gpus))


def _render_state(state: AttemptState, plan: PlacedTask) -> str:
    task, node = plan.task, plan.node
    if task in state.exits:
        return str(state.exits[task].exit)
    if node in state.lost:
        return "unknown: its node is lost"
    if task in state.halted:
        return "stopped by a signal"
    if task in state.started:
        return state.status[task].phase.removeprefix("is ") if task in state.status else "running"
    if state.lacks_gpus:
        return "waiting for GPUs"
    return "waiting for its start" if node in state.ready else "waiting for its node"
