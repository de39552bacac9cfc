"""Makes the order to start a node's tasks, from the plan and the attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launcher.gang.faults import Fault, injections_of
from launcher.plan.launch_plan import TaskPlan
from launcher.tasks import TaskId
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.orders import Start
from worker_entry.protocol.values import TaskStart


def make_start(
    tasks: Sequence[TaskPlan],
    *,
    run_id: str,
    attempt: int,
    lease_s: float,
    faults: Sequence[Fault],
    routes: Mapping[str, str] | None = None,
    callers: Sequence[str] = (),
    readers: Collection[TaskId] = (),
) -> Start:
    """Makes the order to start these tasks of one node.

    Args:
        tasks: the planned tasks.
        run_id: the run's name.
        attempt: the number of the attempt, from 1.
        lease_s: how long TensorFlow's workers wait for each other's heartbeats.
        faults: the faults to inject into the attempt.
        routes: with a tunnel, the host that each address in TF_CONFIG stands for.
        callers: further addresses from which the nodes connect.
        readers: the tasks that read what distlaunch reads from stdin.
    """
    cluster = tasks[0].tf_config["cluster"] if tasks[0].tf_config is not None else {}
    env = {environment.RUN_ID: run_id, environment.ATTEMPT: str(attempt)}
    others = {address: host for address, host in (routes or {}).items() if address != tasks[0].address}
    starts = [
        replace(_make_task_start(task, cluster, env, lease_s, faults), stdin=task.task in readers) for task in tasks
    ]
    return Start(attempt, starts, cluster, others, [*callers])


def _make_task_start(
    task: TaskPlan,
    cluster: Mapping[str, Sequence[str]],
    attempt_env: Mapping[str, str],
    lease_s: float,
    faults: Sequence[Fault],
) -> TaskStart:
    joins = task.tf_config is not None and task.tf_config["cluster"] == cluster  # an evaluator sees a different cluster
    env = {**(task.env if joins else task.whole_env), **attempt_env}
    return TaskStart(
        task=str(task.task),
        program=task.program,
        env=env,
        unset=[environment.TF_CONFIG],
        patch_keras=task.patch_keras,
        coordination_timeout_s=lease_s if task.collective else 0.0,
        progress=task.progress,
        injections=injections_of(task.task, faults),
        joins=joins,
        keep_own_tf_config=task.keep_own_tf_config,
        defaults=sorted(task.defaults),
    )
