"""The state of a pod as Kubernetes shows it: whether it runs, what it waits for, and why it was taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.gang.events import EndAnnounced
from worker_entry.protocol.frozen import dataclass, field

Shown = Mapping[str, Any]

HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError")
"""Reasons for which a container waits until its manifest is changed."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable")
ENDS = ("Evict", "ExceededGracePeriod", "Killing", "NodeNotReady", "OOM", "Preempt", "SystemOOM", "TaintManager")
"""Prefixes of the reasons of events that explain why a pod is taken away."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One of the conditions of an object."""

    kind: str
    holds: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class PodState:
    """A pod at one moment.

    `machine`: the Kubernetes node that it is on. `waits`: why its container does not run, as reason and message.
    `ended`: how its container has ended, as reason and exit status. `grace_s`: from the request to delete the pod to
    SIGKILL; None unless it is being deleted.
    """

    name: str
    uid: str = ""
    address: str = ""
    machine: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    ready: bool = False
    grace_s: float | None = None
    waits: tuple[str, str] = ("", "")
    ended: tuple[str, int] | None = None
    conditions: Sequence[Condition] = field(default=())

    @property
    def is_over(self) -> bool:
        """Whether the pod's container has ended for good."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def is_leaving(self) -> bool:
        return self.is_over or self.grace_s is not None

    @property
    def is_usable(self) -> bool:
        """Whether an agent can be started in the pod."""
        return self.phase == "Running" and self.ready and bool(self.address) and not self.is_leaving

    @property
    def is_hopeless(self) -> bool:
        """Whether the pod cannot run without an outside change."""
        return self.waits[0] in HOPELESS

    def find(self, kind: str) -> Condition | None:
        """The condition of this kind, whether it holds or not."""
        return next((condition for condition in self.conditions if condition.kind == kind), None)


def parse_pod(shown: Shown) -> PodState:
    """The pod, as the API shows it."""
    metadata, spec, status = shown.get("metadata") or {}, shown.get("spec") or {}, shown.get("status") or {}
    containers = status.get("containerStatuses") or []
    own = str(((spec.get("containers") or [{}])[0]).get("name", ""))
    container: Shown = next((each for each in containers if each.get("name") == own), {})
    state: Shown = container.get("state") or {}
    conditions = [
        Condition(
            kind=str(each.get("type", "")),
            holds=each.get("status") == "True",
            reason=str(each.get("reason") or ""),
            message=str(each.get("message") or ""),
        )
        for each in status.get("conditions") or []
    ]
    waiting, ended = state.get("waiting") or {}, state.get("terminated")
    return PodState(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        address=str(status.get("podIP") or ""),
        machine=str(spec.get("nodeName") or ""),
        phase=str(status.get("phase") or ""),
        reason=str(status.get("reason") or ""),
        message=str(status.get("message") or ""),
        ready=any(each.kind == "Ready" and each.holds for each in conditions),
        grace_s=float(metadata.get("deletionGracePeriodSeconds") or 0) if "deletionTimestamp" in metadata else None,
        waits=(str(waiting.get("reason") or ""), str(waiting.get("message") or "")),
        ended=(str(ended.get("reason") or ""), int(ended.get("exitCode") or 0)) if ended is not None else None,
        conditions=tuple(conditions),
    )


def explain_wait(pod: PodState, events: Sequence[str] = ()) -> str:
    """Why the pod does not run yet, in Kubernetes' own words.

    Args:
        pod: the pod.
        events: what the cluster has reported about it, the latest last.
    """
    if pod.grace_s is not None:
        return "the pod is being deleted"
    scheduled = pod.find("PodScheduled")
    if scheduled is not None and not scheduled.holds:
        return scheduled.message or scheduled.reason or "not scheduled yet"
    reason, message = pod.waits
    if reason in PULL_ERRORS or pod.is_hopeless:
        return f"{reason}: {message}" if message else reason
    if events:
        return events[-1]
    if pod.is_over:
        return f"the pod has ended: {render_end(pod)}"
    if pod.phase == "Running":
        return f"the pod is not ready on {pod.machine}"
    return f"its container is being created on {pod.machine}" if pod.machine else "not scheduled yet"


def render_end(pod: PodState) -> str:
    """How the pod's container has ended."""
    if pod.ended is None:
        return pod.reason or pod.phase
    reason, status = pod.ended
    return f"{reason}, exit status {status}" if reason else f"exit status {status}"


def explain_end(pod: PodState, events: Sequence[str], *, is_there: bool, grace_s: float = 0.0) -> EndAnnounced | None:
    """Why the pod was taken away, quoting Kubernetes; None if it is not known to have been taken away.

    Args:
        pod: the pod as it was last seen.
        events: what the cluster has reported about it, the latest last, each as `Reason: message`.
        is_there: whether the pod still exists.
        grace_s: how long the tasks may still run.
    """
    found = _find_reason(pod, events, is_there=is_there)
    if found is None:
        return None
    reference, what = found
    disruption = pod.find("DisruptionTarget")
    words = [f"status: {pod.reason}: {pod.message}".rstrip(": ")] if pod.reason else []
    words += [f"{disruption.kind}: {disruption.reason}: {disruption.message}"] if disruption is not None else []
    words += [f"container: {render_end(pod)}"] if pod.ended is not None else []
    words += [f"event {event}" for event in events if event.startswith(ENDS)][-3:]
    where = f" on {pod.machine}" if pod.machine else ""
    return EndAnnounced(reference, f"pod {pod.name}{where} {what}", tuple(words), grace_s, replaced=True, node=pod.name)


_DISRUPTIONS = {
    "PreemptionByScheduler": ("preempted", "was preempted by another pod"),
    "EvictionByEvictionAPI": ("preempted", "was evicted"),
    "DeletionByTaintManager": ("node-lost", "was deleted because of its node's taints"),
    "DeletionByPodGC": ("node-lost", "was deleted because its node is gone"),
    "TerminationByKubelet": ("preempted", "was ended by its node"),
}
"""The class and the message for each reason of the condition `DisruptionTarget`."""


def _find_reason(pod: PodState, events: Sequence[str], *, is_there: bool) -> tuple[str, str] | None:
    if pod.ended is not None and pod.ended[0] == "OOMKilled":
        return "out-of-memory", "exceeded its memory limit"
    if pod.reason == "Evicted":
        return "preempted", f"was evicted: {pod.message}".rstrip(": ")
    disruption = pod.find("DisruptionTarget")
    if disruption is not None and disruption.holds:
        return _DISRUPTIONS.get(disruption.reason, ("preempted", f"was disrupted: {disruption.reason}"))
    if any(event.startswith("Preempted: ") for event in events):
        return "preempted", "was preempted by another pod"
    if any(event.startswith("TaintManagerEviction: Marking") for event in events):
        return "node-lost", "was deleted because of its node's taints"
    if pod.reason == "NodeLost" or any(event.startswith("NodeNotReady: ") for event in events):
        return "node-lost", "does not answer: its node is not ready"
    if pod.grace_s is not None or not is_there:
        return "preempted", "was deleted"
    if pod.is_over:
        return "preempted", f"has ended: {render_end(pod)}"
    return None
