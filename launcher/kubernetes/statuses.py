"""The consequences of a pod's exit status, as rules of a Job and of a JobSet.

The first process of a pod gives each kind of end a separate status, so that a preemption does not count as a restart, a
task that fails only because a peer is gone decides nothing, and a failure that no restart can fix is not repeated.
"""

from __future__ import annotations

from typing import Any

from launcher.kubernetes.exported import Export, Role
from launcher.kubernetes.yaml_comments import noted
from worker_entry.protocol import pod_statuses as statuses

_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


def make_pod_failure_policy(export: Export, role: Role) -> dict[str, Any]:
    """The rules of a role's Job; a pod that fails in any other way fails the Job, which has no backoff."""
    if is_replaced_alone(export, role):
        free = _rule("Ignore", export, *statuses.PREEMPTED, statuses.COLLATERAL)
        return {"rules": [{"action": "Ignore", "onPodConditions": _DISRUPTED}, free]}
    preempted = "Ignore" if export.kind == "job" and export.spec.restart.max_restarts else "FailJob"
    final = [*statuses.HOPELESS, *(statuses.PREEMPTED if preempted == "FailJob" else ())]
    rules = [
        {
            noted("action", "Evicted, preempted, or its node is gone."): preempted,
            "onPodConditions": _DISRUPTED,
        },
        {
            noted("action", "Failed only because another task was gone; that task's end decides."): "Ignore",
            "onExitCodes": _exit_codes(export, statuses.COLLATERAL),
        },
        _rule("FailJob", export, *final),
    ]
    if preempted == "Ignore":
        rules.append(_rule("Ignore", export, *statuses.PREEMPTED))
    return {"rules": rules}


def make_failure_policy(export: Export) -> dict[str, Any]:
    """The rules of a JobSet, by the messages with which its Jobs fail; the first one that matches counts."""
    count = export.spec.restart.max_restarts
    preempted, hopeless = _pattern(*statuses.PREEMPTED), _pattern(*statuses.HOPELESS)
    policy: dict[str, Any] = {noted("maxRestarts", "restart.max_restarts"): count}
    if not count:
        return policy
    policy[noted("restartStrategy", "All pods of an attempt are gone before the next begins.")] = "BlockingRecreate"
    policy["rules"] = [
        {
            noted("name", "A restart after a preemption is not counted."): "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": ["has condition DisruptionTarget ", preempted],
        },
        {
            noted("name", "No restart would help."): "hopeless",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [hopeless],
        },
    ]
    return policy


def is_replaced_alone(export: Export, role: Role) -> bool:
    """Whether a pod of the role that fails is replaced while the others continue."""
    return role.type == "evaluator" or role.type in export.spec.rules.restarted_individually


def _rule(action: str, export: Export, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": _exit_codes(export, *codes)}


def _exit_codes(export: Export, *codes: int) -> dict[str, Any]:
    return {"containerName": export.container, "operator": "In", "values": sorted(codes)}


def _pattern(*codes: int) -> str:
    return f"failed with exit code ({'|'.join(map(str, sorted(codes)))}) "
