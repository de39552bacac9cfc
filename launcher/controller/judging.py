"""Finds out why an attempt ended: from its last state, its logs, and the engine that allocated its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.controller.context import RunContext
from launcher.gang.state import AttemptState
from launcher.plan.launch_plan import LaunchPlan
from launcher.rundir.log_tails import last_lines
from launcher.tasks import TaskId
from launcher.verdict.judge import judge, outcome
from launcher.verdict.models import Verdict
from worker_entry.protocol.frozen import replace

JUDGED_LINES = 60
"""Lines at the end of a failed task's log, where its cause is most likely."""


def judge_attempt(
    context: RunContext, state: AttemptState, plan: LaunchPlan, logs: Mapping[TaskId, Path]
) -> tuple[AttemptState, Verdict]:
    """Returns the last state, with the engine's announcement if there is one, and the verdict.

    Args:
        context: the run's context.
        state: the state with which the attempt ended.
        plan: the plan of the started tasks.
        logs: the paths of the tasks' logs.
    """
    if context.engine is not None and state.announced is None and outcome(state) == "failed":
        # The engine may have acted before it could be asked.
        state = replace(state, announced=context.engine.find_end({*state.lost}))
    failed = [task for task, event in state.exits.items() if event.failed]
    verdict = judge(
        state,
        plan,
        {task: str(path) for task, path in logs.items()},
        tails={task: last_lines(logs[task], JUDGED_LINES, fold=False) for task in failed},
        agent_stderr=last_lines(context.files.agent_errors, 3),
        stacks=str(context.files.stacks),
    )
    return state, verdict
