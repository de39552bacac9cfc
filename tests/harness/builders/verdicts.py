"""Ended attempts, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.gang.events import (
    Event,
    NodeEmpty,
    TaskExited,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.tasks import TaskId
from launcher.verdict.judge import exit_status, judge
from launcher.verdict.models import Verdict
from tests.harness.builders.gang import (
    W0,
    W1,
    W2,
    make_policy,
    play,
    running,
)
from worker_entry.protocol.values import CrashRecord, Program, TaskExit

THREE = {"a": [W0, W1, W2]}
UNAVAILABLE = "failed to connect to all addresses; last error: ipv4:10.0.0.11:20001: Socket closed"


def plan_of(policy: AttemptPolicy) -> LaunchPlan:
    tasks = [
        TaskPlan(
            directory="/work",
            task=task,
            node=node,
            python="python3",
            address="10.0.0.1",
            port=20000 + task.index,
            explicit_port=False,
            program=Program("script", "train.py"),
            tf_config=None,
            env={},
            secrets=frozenset(),
            patch_keras=True,
        )
        for node, of_node in policy.nodes.items()
        for task in sorted(of_node)
    ]
    return LaunchPlan("test", "multi_worker_mirrored", "/work", tuple(tasks))


def judged(state: AttemptState, agent_stderr: Sequence[str] = ()) -> Verdict:
    logs = {task: f"/runs/x/attempt-1/{task.type}-{task.index}.log" for task in state.policy.tasks}
    return judge(state, plan_of(state.policy), logs, agent_stderr=agent_stderr)


def failed(
    task: TaskId,
    at: float,
    exception: str = "ValueError",
    message: str = "shapes (3,4) and (5,) not aligned",
    *,
    raised: float | None = None,
) -> TaskExited:
    """The end of a Python program with status 1, by default a second after it raised."""
    crash = CrashRecord(at - 1.0 if raised is None else raised, exception, message, "train.py", 88)
    return TaskExited(task, TaskExit(1), at, crash)


def ended(task: TaskId, at: float, code: int | None = 0, by: int | None = None) -> TaskExited:
    return TaskExited(task, TaskExit(None if by else code, by), at)


def status_of(state: AttemptState) -> int:
    return exit_status(state, judged(state))


def history(layout: dict[str, list[TaskId]], *events: Event | float) -> AttemptState:
    """The last state of a gang that ran, received the events, and whose nodes then all became empty."""
    policy = make_policy(layout)
    state, _ = play(policy, *running(policy), *events, *map(NodeEmpty, policy.nodes))
    return state
