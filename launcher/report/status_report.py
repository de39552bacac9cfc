"""The state of a running run: what `distlaunch status --json` prints."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.state import AttemptState, Phase
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.tf_config import format_address
from launcher.report.run_events import StateName
from launcher.result import Result
from launcher.tasks import TaskId
from worker_entry.protocol.samples import TaskSample

PHASES: dict[Phase, StateName] = {
    Phase.FORMING: "forming",
    Phase.RUNNING: "running",
    Phase.STOPPING: "stopping",
    Phase.FINISHED: "stopping",
}
"""The run's state in each phase of an attempt; before them, it is connecting."""


class TaskState(Result):
    """One task now."""

    task: str
    node: str
    state: str
    """A phrase: `is training`, `exit status 1`."""
    address: str | None = None
    """Its address in TF_CONFIG, with the port; null before it is known."""
    pid: int | None = None
    """Its process on the node."""
    epoch: int | None = None
    step: int | None = None
    """The last step that is done; null before the first."""
    step_s: float | None = None
    """Seconds that a recent step took."""
    own_s: float | None = None
    """The same, without the time for which it waited for the others."""
    metrics: dict[str, float | None]
    cpu: float | None = None
    """Cores that it uses; null before the second sample."""
    memory: int | None = None
    """Bytes of resident memory of all of its processes."""
    gpus: list[str]
    """The GPUs that it was given."""


class RunStatus(Result):
    """A running run now."""

    run_id: str
    name: str
    directory: str
    state: StateName
    attempt: int
    restarts: int
    """Restarts of the whole cluster, and of single tasks."""
    started: float
    """When the run began, in Unix seconds by the controller's clock."""
    now: float
    """When this was measured, by the same clock."""
    tasks: list[TaskState]


def make_task_states(state: AttemptState, plan: LaunchPlan, samples: Mapping[TaskId, TaskSample]) -> list[TaskState]:
    """All tasks of an attempt, in the plan's order."""
    return [_make_task_state(state, task, samples.get(task.task)) for task in plan.tasks]


def _make_task_state(state: AttemptState, plan: TaskPlan, sample: TaskSample | None) -> TaskState:
    task = plan.task
    status, started = state.status.get(task), state.started.get(task)
    progress = status.progress if status is not None else None
    has_stepped = progress is not None and progress.first_step is not None
    port = state.ports.get(task)
    return TaskState(
        task=str(task),
        node=plan.node,
        state=_render_state(state, plan),
        address=format_address(plan.address, port) if port is not None else None,
        pid=started.pid if started is not None else None,
        epoch=progress.epoch if progress is not None else None,
        step=progress.step if progress is not None and has_stepped else None,
        step_s=progress.step_s if progress is not None else None,
        own_s=progress.own_s if progress is not None else None,
        metrics=progress.metrics if progress is not None else {},
        cpu=sample.cpu if sample is not None and task not in state.exits else None,
        memory=sample.memory if sample is not None and task not in state.exits else None,
        gpus=[name for name in plan.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name not in ("", "-1")],
    )


def _render_state(state: AttemptState, plan: TaskPlan) -> str:
    task, node = plan.task, plan.node
    if task in state.exits:
        return str(state.exits[task].exit)
    if node in state.lost:
        return "unknown: its node is lost"
    if task in state.halted:
        return "is stopped by a signal"
    if task in state.started:
        return state.status[task].phase if task in state.status else "runs"
    return "waits for its start" if node in state.ready else "waits for its node"
