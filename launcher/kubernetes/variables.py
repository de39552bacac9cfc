"""The environment of an exported task, which Kubernetes completes in each pod: all pods of a role have one manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.errors import UsageError
from launcher.kubernetes.exported import Export, Role
from launcher.kubernetes.pod import HOME
from launcher.kubernetes.yaml_comments import noted
from launcher.plan.framework_env import make_rank_env
from launcher.plan.making import own_env
from launcher.plan.tf_config import LIMIT, format_address, make_tf_configs, render
from launcher.spec.redaction import is_secret
from launcher.tasks import TaskId
from worker_entry.protocol import environment

INDEX = "TASK_INDEX"
"""Our variable with the pod's index; variables after it may contain `$(TASK_INDEX)`."""
_REFERENCE = f"$({INDEX})"


def literal(text: str) -> str:
    """The text, escaped: Kubernetes expands nothing in it."""
    return text.replace("$", "$$")


def find_secrets(export: Export) -> list[str]:
    """The variables that come from the Secret."""
    named = [name for name, value in export.env.items() if is_secret(name, value)]
    return [*export.spec.env_from, *(name for name in named if name not in export.spec.env_from)]


def make_variables(export: Export, role: Role) -> list[dict[str, Any]]:
    """The variables of the pods of a role, as a container lists them.

    Raises:
        UsageError: TF_CONFIG would be too long.
    """
    return [*_places(export), *_own(export, role), *_given(export)]


def _places(export: Export) -> Iterator[dict[str, Any]]:
    """The variables whose values only the pod knows."""
    label = "metadata.labels['training.kubeflow.org/replica-index']"
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    where = label if export.kind == "tfjob" else annotation
    yield {
        noted("name", f"Comes first: Kubernetes expands {_REFERENCE} only in variables after it."): INDEX,
        "valueFrom": {"fieldRef": {"fieldPath": where}},
    }
    if export.kind in ("jobset", "trainjob"):
        attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
        yield {"name": environment.RESTARTS, "valueFrom": {"fieldRef": {"fieldPath": attempt}}}


def _own(export: Export, role: Role) -> Iterator[dict[str, Any]]:
    spec, task = export.spec, TaskId(role.type, 0)
    config = None
    if spec.framework == "tensorflow" and export.kind != "tfjob":
        config = make_tf_configs(export.addresses())[task]
    env = {**HOME, environment.RUN_ID: export.name, **own_env(spec, task, config)}
    env.pop("TF_GRPC_REUSE_PORT", None)  # nothing holds the port in advance: it is the pod's own
    env[environment.TASK] = f"{role.type}:{_REFERENCE}"
    if spec.logs is not None:
        env[environment.LOG_DIR] = f"{spec.logs}/{role.type}-{_REFERENCE}"
    if config is not None:
        text = render(config)
        if len(text) > LIMIT:
            raise UsageError(f"nodes: TF_CONFIG of {export.size:,} pods is too long for an environment variable")
        env[environment.TF_CONFIG] = text.replace('"index":0}', f'"index":{_REFERENCE}}}')
    if spec.framework != "tensorflow":
        first = format_address(export.host(task), export.port)
        env.update(make_rank_env(spec.framework, first, _REFERENCE, export.size))
    if spec.framework == "torch":
        env.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    comments = {
        environment.TF_CONFIG: "nodes: the pods' names are known before they exist.",
        environment.STRATEGY: "strategy",
        environment.DEVICES: "devices",
        environment.COMMUNICATION: "communication",
        environment.CROSS_DEVICE: "cross_device",
        environment.LOG_DIR: "log_directory",
        environment.CHECKPOINT_DIR: "checkpoint_directory",
        "MASTER_ADDR": "framework",
        environment.JAX_COORDINATOR: "framework",
        "HOME": "The security context's user has no home folder in the image.",
    }
    given = {*export.env, *export.spec.env_from}
    for name, value in env.items():
        if name not in given:
            yield {noted("name", comments[name]) if name in comments else "name": name, "value": value}


def _given(export: Export) -> Iterator[dict[str, Any]]:
    secrets = find_secrets(export)
    for name, value in export.env.items():
        if name not in secrets:
            yield {noted("name", f"env.{name}"): name, "value": literal(value)}
    for name in secrets:
        field = "env_from" if name in export.spec.env_from else f"env.{name}, which looks like a secret"
        reference = {"name": export.secret, "key": name}
        yield {noted("name", field): name, "valueFrom": {"secretKeyRef": reference}}
