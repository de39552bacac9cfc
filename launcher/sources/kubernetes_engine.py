"""The Kubernetes engine of a run: finds out which of its pods are taken away, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from launcher.gang.decide import FAILURE_GRACE_S
from launcher.gang.events import EndAnnounced
from launcher.kubernetes.job import TERMINATION_S
from launcher.kubernetes.pod_state import PodState, explain_end
from launcher.sources.pods import RunPods
from launcher.wording import count_of
from worker_entry.protocol.frozen import replace

NEWS_S = 2.0
"""How long the cluster may take to report why a pod was lost."""
_POLL_S = 0.1


class KubernetesEngine:
    """The engine of a run whose nodes are pods."""

    def __init__(self, pods: RunPods, warn: Callable[[str], None]) -> None:
        self._pods = pods
        self._warn = warn

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Announces pods that are taken away."""

        def note(pod: PodState, is_there: bool) -> None:
            if pod.name in self._pods.order and (end := self._explain(pod, is_there=is_there)) is not None:
                put(end)

        self._pods.watcher = note

    def close(self) -> None:
        self._pods.watcher = lambda _pod, _is_there: None

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Answers None: Kubernetes signals only each pod's first process, neither this process nor the agents."""
        answer(None)

    def forget(self) -> None:
        """Does nothing: the engine keeps no state of earlier attempts except the order of the pods."""

    def find_end(self, lost: Collection[str]) -> EndAnnounced | None:
        """Why a pod of the run was taken away or has ended; None if no such pod is known."""
        until = time.monotonic() + (NEWS_S if lost else 0.0)
        while True:
            for name in self._pods.order:
                seen = self._pods.find(name)
                if seen is not None and (end := self._explain(seen[0], is_there=seen[1])) is not None:
                    return replace(end, grace_s=0.0)
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)

    def release(self) -> int | None:
        """Removes the pods; returns how many are left, None if that is unknown."""
        left = self._pods.remove()
        if left != 0:
            what = "it is unknown which pods are left" if left is None else f"{count_of(left, 'pod')} left"
            self._warn(f"{what}; see `kubectl get pods --selector={self._pods.selector}`")
        return left

    def _explain(self, pod: PodState, *, is_there: bool) -> EndAnnounced | None:
        grace_s = FAILURE_GRACE_S if pod.grace_s is None else max(pod.grace_s - TERMINATION_S, 0.0)
        events = self._pods.events("Pod", pod.name) if pod.is_leaving or not pod.ready or not is_there else []
        return explain_end(pod, events, is_there=is_there, grace_s=grace_s)
