"""The fields of a spec that no manifest can express, and why."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.kubernetes.exported import Kind
from launcher.kubernetes.variables import INDEX
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.spec.parts import RestartSpec, TimeoutsSpec
from launcher.spec.pods import PodsSpec
from launcher.spec.redaction import hide_words
from launcher.spec.strategies import FRAMEWORKS
from launcher.tasks import TASK_TYPES

_NO_CONTROLLER = "needs a controller, and exported pods have none; remove it, or run the spec with `up`"
_CONTROLLED = ("check_speed", "collect", "metrics", "metrics_file", "notify", "report")
_OF_MACHINES = ("connection", "ssh", "host_keys", "slurm")
_WORKERS_ONLY = {
    "job": "an Indexed Job has pods of one kind; use --as jobset",
    "trainjob": "Trainer runs nodes of one kind; use --as jobset",
}


def find_refusals(spec: ClusterSpec, pods: PodsSpec, kind: Kind) -> Iterator[tuple[str, str]]:
    """Each field at fault, and the reason.

    Args:
        spec: the spec to export.
        pods: the settings of each pod.
        kind: the kind of the exported objects.
    """
    yield from _refuse_nodes(spec)
    yield from _refuse_roles(spec, kind)
    given = spec.model_fields_set
    for field in _OF_MACHINES:
        if field in given:
            yield field, "says how machines are reached, and Kubernetes starts pods itself; remove it"
    if spec.isolation != "none":
        yield "isolation", "a pod has a network of its own, and the NetworkPolicy closes it; remove it"
    if spec.guard == "required":
        yield "guard", "nobody checks whether the cluster enforces its NetworkPolicy; write `auto`, or `off` for none"
    if spec.tensorboard:
        yield "tensorboard", "would need a pod that outlives the training; point a TensorBoard at `log_directory`"
    if spec.cache is not None:
        yield "cache", "is made by a node's agent, and exported pods have none; name a folder in `env`"
    if spec.stdin == "all":
        yield "stdin", _NO_CONTROLLER
    if spec.wait_gpus_s is not None:
        yield "wait_gpus_s", "Kubernetes gives a GPU to one pod only; remove it"
    for field in _CONTROLLED:
        if getattr(spec, field):
            yield field, _NO_CONTROLLER
    if INDEX in spec.env or INDEX in spec.env_from:
        yield f"env.{INDEX}" if INDEX in spec.env else "env_from", f"{INDEX} is set by the manifest; remove it"
    yield from _refuse_restarts(spec.restart)
    yield from _refuse_timeouts(spec.timeouts)
    words = spec.program.command or spec.program.args
    if hide_words(words) != list(words):
        field = "program.args" if spec.program.command is None else "program.command"
        yield field, "has what looks like a secret, and a manifest is not secret; pass it through `env_from`"
    yield from _refuse_paths(spec, pods)


def _refuse_nodes(spec: ClusterSpec) -> Iterator[tuple[str, str]]:
    source = spec.source
    if isinstance(source, PodsSpec):
        if source.workers_per_pod > 1:
            pods = source.count * source.workers_per_pod
            why = "Kubernetes judges and restarts whole pods, so each has one worker"
            yield "nodes.workers_per_pod", f"{why}; write `count: {pods}`, and what each of these gets"
        return
    if source is not None:
        yield "nodes", "names its nodes only when it runs; list them, or write `from: kubernetes`"
        return
    first = spec.nodes[0]
    for index, node in enumerate(spec.nodes):
        path = f"nodes[{index}]"
        if node.spare:
            yield f"{path}.spare", "Kubernetes replaces lost pods itself; remove the node"
        for field in ("address", "addresses"):
            if getattr(node, field) is not None:
                yield f"{path}.{field}", "pods get their names from the Service; remove it"
        for field in ("connection", "ssh"):
            if field in node.model_fields_set:
                yield f"{path}.{field}", "says how a machine is reached; remove it"
        for field in _unlike(first, node):
            yield f"{path}.{field}", "differs from nodes[0], but all pods are alike"


def _unlike(first: NodeSpec, node: NodeSpec) -> Iterator[str]:
    fields = ("port", "gpus_per_worker", "python", "env")
    yield from (field for field in fields if getattr(node, field) != getattr(first, field))
    if len(node.gpus or ()) != len(first.gpus or ()):
        yield "gpus"


def _refuse_roles(spec: ClusterSpec, kind: Kind) -> Iterator[tuple[str, str]]:
    if spec.strategy == "tpu":
        yield "strategy", "a TPU's pods get their node pool and addresses from its provider; write their own manifest"
    if isinstance(spec.source, PodsSpec) and spec.rules.alone and spec.source.count > 1:
        yield "nodes.count", f"{spec.strategy} runs one process; write `count: 1`"
    if kind in _WORKERS_ONLY:
        if spec.framework == "tensorflow" and spec.rules.needs:
            yield "strategy", f"{spec.strategy} needs more than workers, and {_WORKERS_ONLY[kind]}"
        for task_type in TASK_TYPES:
            if task_type != "worker" and any(node.count(task_type) for node in spec.nodes):
                yield f"nodes.tasks.{task_type}", _WORKERS_ONLY[kind]
    if kind == "tfjob" and spec.framework in FRAMEWORKS:
        yield "framework", f"a TFJob sets TF_CONFIG and nothing for {FRAMEWORKS[spec.framework][0]}; use --as jobset"


def _refuse_restarts(restart: RestartSpec) -> Iterator[tuple[str, str]]:
    for field, why in (
        ("period_s", "Kubernetes counts restarts over the whole run"),
        ("min_workers", "Kubernetes restarts with as many pods as before"),
    ):
        if getattr(restart, field):
            yield f"restart.{field}", f"{why}; remove it"
    if "on" in restart.model_fields_set:
        yield "restart.on", "Kubernetes knows exit statuses, not these classes; remove it"


def _refuse_timeouts(timeouts: TimeoutsSpec) -> Iterator[tuple[str, str]]:
    for field in ("drain_s", "stall_s", "lease_s"):
        if field in timeouts.model_fields_set and getattr(timeouts, field):
            yield f"timeouts.{field}", _NO_CONTROLLER


def _refuse_paths(spec: ClusterSpec, pods: PodsSpec) -> Iterator[tuple[str, str]]:
    """Yields the folders that a pod does not have, or loses when it ends."""
    for field in ("checkpoint_directory", "log_directory"):
        path = getattr(spec, field)
        if path is not None and not _is_within(path, pods):
            yield field, f"{path} is in no volume, and would be lost with its pod; add --volume CLAIM:{path}"
    directory = spec.working_directory or ""
    if directory.startswith("~"):
        yield "working_directory", "a pod's user has no home folder; write a path of the image or of a volume"
    if isinstance(spec.source, PodsSpec):
        return  # the paths are those of the pods' image
    command = spec.program.command or [""]
    named = (
        ("working_directory", directory),
        ("program.script", spec.program.script or ""),
        ("program.command", command[0]),
    )
    for field, path in named:
        if path.startswith("/") and not _is_within(path, pods):
            yield field, f"{path} is a path of the spec's machines; use a relative one, or add --volume CLAIM:PATH"


def _is_within(path: str, pods: PodsSpec) -> bool:
    """Whether a path is in one of the volumes."""
    return any(f"{path.rstrip('/')}/".startswith(f"{place.rstrip('/')}/") for place in pods.volumes.values())
