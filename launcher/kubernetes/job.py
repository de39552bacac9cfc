"""The job that creates a run's pods, and replaces each pod that Kubernetes takes away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.kubernetes.pod import HOME, QUEUE, TEMPORARY_VOLUME, Manifest, make_labels, make_name, make_pod_spec
from launcher.spec.nodes import PYTHON
from launcher.spec.pods import PodsSpec
from worker_entry.pod import keeper

JOB_NAME_LENGTH = 52
"""Characters of a job's name: the names of its pods have a suffix."""
TERMINATION_S = 15.0
"""How much longer than its tasks a pod may take to end."""
UNMET_S = 86_400.0
"""A pod ends after this long without an agent: its controller is gone."""
KEPT_S = 3600
"""How long Kubernetes keeps the record of an ended job."""
AWAIT_KEEPER = """
import time
for _ in range(100):
    with open("/proc/1/status") as status:
        if int(status.read().partition("SigBlk:")[2].split()[0], 16) >> 14 & 1:
            break
    time.sleep(0.1)
"""
"""Waits until process 1 blocks SIGTERM (15, so bit 14): before that, the kernel drops the signal."""
RETRIES = 1_000_000
"""The number of pods that may be lost; practically unlimited, because the run itself counts its restarts."""


def make_job(
    source: PodsSpec,
    template: Mapping[str, Any],
    *,
    run: str,
    grace_s: float,
    idle_s: float,
    owner: Mapping[str, Any] | None = None,
) -> Manifest:
    """The job.

    Args:
        source: the settings of its pods.
        template: see `make_pod_spec`.
        run: the run's name.
        grace_s: how long tasks have to save when a pod is taken away.
        idle_s: a pod ends after this long without any process of ours.
        owner: the reference to the object with which the job is deleted.
    """
    name = make_name(run, JOB_NAME_LENGTH)
    text = Path(keeper.__file__).read_text(encoding="utf-8")
    first_s = max(source.wait_s + idle_s, UNMET_S)
    python = source.python or PYTHON
    # Otherwise, a pod that is deleted while its Python starts stays until its grace is over.
    stop = {"preStop": {"exec": {"command": [python, "-c", AWAIT_KEEPER]}}}
    pod = make_pod_spec(
        source,
        template,
        command=[python, "-c", text, str(first_s), str(idle_s)],
        grace_s=grace_s + TERMINATION_S,
        container={"lifecycle": stop},
        env=[{"name": name, "value": value} for name, value in HOME.items()],
        mounts=[TEMPORARY_VOLUME],
    )
    given: Mapping[str, Any] = template.get("metadata") or {}
    labels = {**(given.get("labels") or {}), **make_labels(name)}
    annotations = {"kubectl.kubernetes.io/default-container": pod["containers"][0]["name"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**make_labels(name), **({QUEUE: source.queue} if source.queue else {})},
            **({"ownerReferences": [owner]} if owner is not None else {}),
        },
        "spec": {
            "parallelism": source.count,
            "completions": source.count,
            "backoffLimit": RETRIES,
            "ttlSecondsAfterFinished": KEPT_S,
            # Kueue resumes the suspended job when there is room for all pods.
            **({"suspend": True} if source.queue else {}),
            "template": {
                "metadata": {
                    "labels": labels,
                    "annotations": {**annotations, **(given.get("annotations") or {})},
                },
                "spec": pod,
            },
        },
    }
