"""Makes the manifests that run a spec without distlaunch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from launcher.errors import UsageError
from launcher.kubernetes.entry import check_size
from launcher.kubernetes.exported import NAME_LENGTH, Export, Kind, Role
from launcher.kubernetes.kinds import make_manifests
from launcher.kubernetes.pod import make_name
from launcher.kubernetes.refusals import find_refusals
from launcher.kubernetes.variables import find_secrets
from launcher.kubernetes.yaml_comments import render_documents
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import PYTHON
from launcher.spec.pods import PodsSpec
from launcher.tasks import TASK_TYPES
from launcher.wording import count_of

PORT = 2222
"""A pod has a network of its own, in which no other program takes this port."""
SHOWN_LIMIT = 20

_NEEDS = {
    "jobset": "JobSet (jobset.x-k8s.io)",
    "job": "Kubernetes 1.31 or newer",
    "tfjob": "Kubeflow's training operator, superseded by JobSet and Trainer",
    "trainjob": "Kubeflow Trainer 2 and JobSet",
}


def choose_pods(spec: ClusterSpec, image: str | None, volumes: Mapping[str, str]) -> PodsSpec:
    """The settings of each pod: those of the spec, or else derived from its nodes.

    Args:
        spec: a spec with nodes, or with `from: kubernetes`.
        image: replaces the spec's image.
        volumes: claims and their folders, in addition to the spec's.

    Raises:
        UsageError: there is no image.
    """
    source = spec.source
    if isinstance(source, PodsSpec):
        return source.changed(volumes={**source.volumes, **volumes}, **({"image": image} if image is not None else {}))
    if image is None:
        raise UsageError(
            "the spec names machines, and pods need an image",
            hint="name it with --image, or write `nodes: {from: kubernetes, image: …}`",
        )
    first = spec.nodes[0] if spec.nodes else None
    gpus = 0
    if first is not None:
        workers = sum(first.count(task_type) for task_type in spec.rules.computes)
        gpus = first.gpus_per_worker or len(first.gpus or ()) // max(workers, 1)
    return PodsSpec(image=image, gpus=gpus, volumes=dict(volumes))


def make_export(
    spec: ClusterSpec,
    kind: Kind,
    pods: PodsSpec,
    *,
    template: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> Export:
    """Makes the export.

    Args:
        spec: the cluster.
        kind: the kind of its objects.
        pods: the result of `choose_pods`.
        template: the user's own manifest of a pod; may be empty.
        files: what the pods' ConfigMap holds.

    Raises:
        UsageError: the spec has fields that no manifest can express; the error names each of them.
    """
    refused = [f"{field}: {reason}" for field, reason in find_refusals(spec, pods, kind)]
    if refused:
        raise UsageError(f"the spec cannot be exported as a {kind}", evidence=refused[:SHOWN_LIMIT])
    check_size(files)
    first = spec.nodes[0] if spec.nodes else None
    return Export(
        name=_make_name(spec.name),
        kind=kind,
        spec=spec,
        pods=pods,
        roles=_find_roles(spec, pods),
        python=pods.python or (first and first.python) or spec.python or PYTHON,
        port=(first and first.port) or PORT,
        env={**spec.env, **(first.env if first is not None else {})},
        template=template,
        files=files,
    )


def _make_name(text: str) -> str:
    """The name of all objects; a Service's name has to begin with a letter."""
    name = make_name(text, NAME_LENGTH)
    return name if name[0].isalpha() else make_name(f"run-{name}", NAME_LENGTH)


def _find_roles(spec: ClusterSpec, pods: PodsSpec) -> tuple[Role, ...]:
    if isinstance(spec.source, PodsSpec):
        tasks = [spec.tasks_for(1, index) for index in range(pods.count)]
        counts = {task_type: sum(each.get(task_type, 0) for each in tasks) for task_type in TASK_TYPES}
    else:
        counts = {task_type: sum(node.count(task_type) for node in spec.nodes) for task_type in TASK_TYPES}
    return tuple(Role(task_type, count) for task_type, count in counts.items() if count)


def render_export(export: Export) -> str:
    """The manifests as a file for `kubectl apply`."""
    return render_documents(make_manifests(export), "\n".join(_make_header(export)))


def _make_header(export: Export) -> list[str]:
    strategy = export.spec.strategy if export.spec.framework == "tensorflow" else export.spec.framework
    context = export.pods.context
    kubectl = ["kubectl", *(["--context", context] if context is not None else [])]
    lines = [
        f"{export.spec.name}: {strategy}, {count_of(export.size, 'pod')}. Written by `distlaunch export kubernetes`.",
        f"Needs {_NEEDS[export.kind]}.",
        "",
        f"  {shlex.join([*kubectl, 'apply', '--server-side', '-f', 'THIS_FILE'])}",
        "",
        "Without --server-side, kubectl would copy the ConfigMap into an annotation, which is too small for it.",
        "",
        "Comments name the fields of the spec that the parts come from.",
    ]
    secrets = find_secrets(export)
    if secrets:
        # The shell takes the values from the environment, so that they are in no file.
        literals = [f'--from-literal={name}="${name}"' for name in secrets]
        place = ["-n", export.pods.namespace] if export.pods.namespace is not None else []
        command = shlex.join([*kubectl, *place, "create", "secret", "generic", export.secret])
        lines += [
            "",
            "Create its Secret first, in a shell that has these variables:",
            "",
            " \\\n      ".join([f"  {command}", *literals]),
        ]
    return lines
