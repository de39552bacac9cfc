"""A run's pods as the nodes of its spec: finds out which of them are taken away, and why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import TakenOverError, UsageError
from launcher.gang.decide import FAILURE_GRACE_S
from launcher.gang.events import EndAnnounced
from launcher.kubernetes.calls import Kubectl
from launcher.kubernetes.job import TERMINATION_S, make_job
from launcher.kubernetes.pod_state import PodState, explain_end
from launcher.kubernetes.template import read_template
from launcher.sources.base import NodeSource
from launcher.sources.node_list import place_pods
from launcher.sources.pods import RunPods
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.tasks import name_tasks
from launcher.wording import count_of
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import replace

NEWS_S = 2.0
"""How long the cluster may take to report why a pod was lost."""
_POLL_S = 0.1
IDLE_MARGIN_S = 300.0
"""How much longer a pod without an agent stays than a run may take to return to it."""


class KubernetesPods(NodeSource):
    """The pods of a run.

    Args:
        source: what the spec asks for.
        pods: created at the first `find`.
        warn: gets messages for the user.
    """

    is_lazy = True

    def __init__(self, source: PodsSpec, pods: RunPods, warn: Callable[[str], None]) -> None:
        self._source = source
        self._pods = pods
        self._warn = warn

    def find(self, spec: ClusterSpec, is_wanted: Callable[[], bool], tell: Callable[[str], None]) -> ClusterSpec:
        """Waits until all pods run.

        Raises:
            KubernetesError: the pods cannot be created, or do not run in time.
        """
        self._pods.begin()
        slots = [name_tasks(task for other, task in spec.placements() if other is node) for node in spec.nodes]
        found = self._pods.await_usable(is_wanted, tell, slots, self._source.wait_s)
        return place_pods(spec, [(pod.name, pod.address) for pod in found]) if found else spec

    def keep(self, nodes: Sequence[str]) -> None:
        self._pods.begin(nodes)

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Announces pods that are taken away."""

        def note(pod: PodState, is_there: bool) -> None:
            if pod.name in self._pods.order and (end := self._explain(pod, is_there=is_there)) is not None:
                put(end)

        self._pods.watcher = note

    def close(self) -> None:
        self._pods.watcher = lambda _pod, _is_there: None

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
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


@contextlib.contextmanager
def opened_pods(
    spec: ClusterSpec, source: PodsSpec, *, run_id: str, cwd: str, warn: Callable[[str], None]
) -> Iterator[KubernetesPods]:
    """Yields the pods of a run, not created yet; removes them at the end.

    Raises:
        UsageError: the pod template cannot be read.
    """
    idle_s = spec.timeouts.lease_s + spec.restart.return_s + IDLE_MARGIN_S
    manifest = make_job(
        source,
        read_pod_template(source, cwd),
        run=run_id,
        grace_s=spec.timeouts.stop_grace_s,
        idle_s=idle_s,
        owner=_find_owner(os.environ),
    )
    pods = RunPods(Kubectl(source.context, source.namespace), manifest)
    try:
        yield KubernetesPods(source, pods, warn)
    except TakenOverError:
        pods.close()  # the pods now belong to another controller
        raise
    except BaseException:
        pods.remove()
        raise
    pods.remove()


def read_pod_template(source: PodsSpec, cwd: str) -> Mapping[str, Any]:
    """The manifest on which the pods are based; empty if the spec names none.

    Raises:
        UsageError: the manifest cannot be read.
    """
    if source.template is None:
        return {}
    path = Path(cwd, source.template).expanduser()
    try:
        return read_template(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}", hint="correct `nodes.template`") from None


def _find_owner(environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The job of this process's own pod: its deletion also deletes everything that this process creates."""
    name, uid = environ.get(environment.OWNER_NAME), environ.get(environment.OWNER_UID)
    if not name or not uid:
        return None
    return {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "blockOwnerDeletion": False}
