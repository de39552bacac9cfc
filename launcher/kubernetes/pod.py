"""The pods of a cluster as manifests, without the programs that run in them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.spec.pods import PodsSpec

Manifest = dict[str, Any]
"""An object of Kubernetes, or a part of one, as YAML has it."""

RUN = "distlaunch/run"
"""The label with the name of the run that made an object."""
MANAGED_BY = "app.kubernetes.io/managed-by"
QUEUE = "kueue.x-k8s.io/queue-name"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a file system's place, not a file's
TEMPORARY = "/tmp"  # noqa: S108 - a container's own
TEMPORARY_VOLUME: tuple[Manifest, Manifest] = (
    {"name": "temporary", "emptyDir": {}},
    {"name": "temporary", "mountPath": TEMPORARY},
)
"""The volume, and how a container mounts it."""
USER = 1000
HOME = {"HOME": TEMPORARY, "USER": "distlaunch"}
"""The pod's user has no entry in the image, where programs would look for these."""
SECURE_POD: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
SECURE_CONTAINER: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
CLAIM = "claim-"
"""The prefix of the names of persistent volumes."""
_LABEL_LENGTH = 63


def make_name(text: str, length: int = _LABEL_LENGTH) -> str:
    """The text as the name of an object whose pods are named after it: a DNS label.

    Args:
        text: the text to convert.
        length: the maximum length of the name; a pod's name is longer than its owner's.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name[:length].strip("-") or "run"


def make_labels(run: str) -> dict[str, str]:
    """The labels of all objects of a run."""
    return {RUN: run, MANAGED_BY: "distlaunch"}


def make_pod_spec(
    source: PodsSpec,
    template: Mapping[str, Any],
    *,
    command: Sequence[str],
    grace_s: float,
    env: Sequence[Mapping[str, Any]] = (),
    container: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    mounts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (),
) -> Manifest:
    """The `spec` of a pod. It runs as an ordinary user, with no more rights than a program needs.

    Args:
        source: the settings of each pod.
        template: the user's own manifest of a pod, on which ours is based; may be empty.
        command: the container's command.
        grace_s: from SIGTERM to SIGKILL.
        env: variables of the container.
        container: more fields of the container; `template` overrides them.
        pod: more fields of the pod; `template` overrides them.
        mounts: more volumes, each with how the container mounts it.
    """
    given: Manifest = copy.deepcopy(dict(template.get("spec") or {}))
    first, *others = given.get("containers") or [{}]
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [
        (memory, {"name": "shared-memory", "mountPath": SHARED_MEMORY}),
        *(_make_claim(claim, path) for claim, path in source.volumes.items()),
        *mounts,
    ]
    taken = {mount.get("mountPath") for mount in first.get("volumeMounts") or ()}
    pairs = [pair for pair in pairs if pair[1]["mountPath"] not in taken]
    mounted, volumes = [mount for _, mount in pairs], [volume for volume, _ in pairs]
    ours = {each["name"] for each in env}  # the last of equal names counts, and server-side apply refuses equal names
    made = {
        "name": "node",
        "securityContext": SECURE_CONTAINER,
        **(container or {}),
        **first,
        "image": source.image,
        "command": [*command],
        "env": [*(each for each in first.get("env") or () if each.get("name") not in ours), *env],
        "resources": _merge(first.get("resources") or {}, make_resources(source)),
        "volumeMounts": [*(first.get("volumeMounts") or ()), *mounted],
    }
    return {
        "automountServiceAccountToken": False,
        "securityContext": SECURE_POD,
        **(pod or {}),
        **given,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(grace_s),
        **({"priorityClassName": source.priority_class} if source.priority_class else {}),
        "containers": [{name: value for name, value in made.items() if value not in ([], {})}, *others],
        "volumes": [*(given.get("volumes") or ()), *volumes],
    }


def _make_claim(claim: str, path: str) -> tuple[Manifest, Manifest]:
    """The volume, and how the container mounts it."""
    name = make_name(f"{CLAIM}{claim}")
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}, {"name": name, "mountPath": path}


def make_resources(source: PodsSpec) -> Manifest:
    """The resource requests and limits of each pod."""
    requests = {"cpu": source.cpus, "memory": source.memory}
    limits = {"memory": source.memory, source.gpu_resource: str(source.gpus) if source.gpus else None}
    parts = {"requests": requests, "limits": limits}
    chosen = {part: {name: value for name, value in values.items() if value} for part, values in parts.items()}
    return {part: values for part, values in chosen.items() if values}


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    """Both mappings, merged; `over` overrides `under`."""
    merged = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], Mapping) and isinstance(over[name], Mapping):
            merged[name] = _merge(under[name], over[name])
    return merged
