"""A run's pods as the nodes of its spec."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import TakenOverError, UsageError
from launcher.kubernetes.calls import Kubectl
from launcher.kubernetes.job import make_job
from launcher.kubernetes.template import read_template
from launcher.sources.node_list import take_pods
from launcher.sources.pods import RunPods
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.tasks import name_tasks
from worker_entry.protocol import environment

IDLE_MARGIN_S = 300.0
"""How long a pod without an agent stays after the time in which a run may return to it."""


@contextlib.contextmanager
def opened_pods(spec: ClusterSpec, run_id: str, cwd: str) -> Iterator[RunPods | None]:
    """Yields the pods of a run, not created yet, None if its nodes are not pods; removes the pods at the end.

    Raises:
        UsageError: the pod template cannot be read.
    """
    source = spec.source
    if not isinstance(source, PodsSpec):
        yield None
        return
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
        yield pods
    except TakenOverError:
        pods.close()  # the pods now belong to another controller
        raise
    except BaseException:
        pods.remove()
        raise
    pods.remove()


def ask_pods(
    spec: ClusterSpec, pods: RunPods, is_wanted: Callable[[], bool], tell: Callable[[str], None]
) -> ClusterSpec:
    """Waits until all pods run and returns the spec with them; the same spec if they are no longer wanted.

    Raises:
        KubernetesError: the pods cannot be created, or do not run in time.
    """
    assert isinstance(spec.source, PodsSpec)
    pods.begin()
    slots = [name_tasks(task for other, task in spec.placements() if other is node) for node in spec.nodes]
    found = pods.await_usable(is_wanted, tell, slots, spec.source.wait_s)
    return take_pods(spec, [(pod.name, pod.address) for pod in found]) if found else spec


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
