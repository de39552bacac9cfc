"""Selects the nodes that the speed check measures, with their environments and the targets that partners dial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.gang.checks.preflight import Answers
from launcher.gang.checks.speed_check import Subject
from launcher.plan.launch_plan import LaunchPlan
from launcher.tasks import TaskId
from worker_entry.protocol.values import Target


def make_subjects(
    plan: LaunchPlan, answers: Mapping[str, Answers], addresses: Mapping[str, str], ports: Mapping[TaskId, int]
) -> list[Subject]:
    """The nodes with computing tasks, in the order of the plan.

    A node is measured with the device and the threads of its first computing task, while nothing else computes there.
    So nodes with different numbers of tasks can be compared: a step waits for the slowest *task*, and each task has
    its own share of its node.

    Args:
        plan: the plan with the nodes' facts.
        answers: the nodes' answers to the checks.
        addresses: the addresses that the checks chose, by node.
        ports: the ports held for the tasks.
    """
    return [*_find_subjects(plan, answers, addresses, ports)]


def _find_subjects(
    plan: LaunchPlan, answers: Mapping[str, Answers], addresses: Mapping[str, str], ports: Mapping[TaskId, int]
) -> Iterator[Subject]:
    for node in plan.nodes:
        inspected = answers[node].inspected if node in answers else None
        tasks = [task for task in plan.tasks if task.node == node and not task.task.is_auxiliary]
        computing = [task for task in tasks if task.task.type in plan.rules.computes]
        if inspected is None or not computing:
            continue
        dialled = [task.task for task in tasks if task.task.type != "evaluator" and task.task in ports]
        yield Subject(
            node=node,
            machine=inspected.machine or node,
            methods=inspected.methods,
            env=computing[0].env,
            target=Target(str(dialled[0]), addresses[node], ports[dialled[0]]) if dialled else None,
        )
