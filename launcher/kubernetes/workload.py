"""The parts that objects of all kinds share: the pods of a role, their files, and who may reach the pods."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.kubernetes.entry import ENTRY, FOLDER, PROGRAM
from launcher.kubernetes.exported import Export, Role
from launcher.kubernetes.pod import (
    CLAIM,
    MANAGED_BY,
    QUEUE,
    RUN,
    SECURE_CONTAINER,
    SHARED_MEMORY,
    TEMPORARY,
    TEMPORARY_VOLUME,
    Manifest,
    make_labels,
    make_pod_spec,
)
from launcher.kubernetes.variables import literal, make_variables
from launcher.kubernetes.yaml_comments import note, noted
from launcher.plan.making import program_of
from worker_entry.protocol.values import Program

GRACE_S = 5.0
"""Seconds that the first process of a pod has, after the grace of its program, to report how it ended."""

_POD_COMMENTS = {
    "automountServiceAccountToken": "The program has no business with the API server.",
    "securityContext": "Even images that run as root by default run as this user, who may write to the volumes; "
    "`nodes.template` overrides this.",
    "restartPolicy": "Kubernetes looks at exit statuses only with this policy.",
    "terminationGracePeriodSeconds": "timeouts.stop_grace_s, and 5 s to report the end.",
    "priorityClassName": "nodes.priority_class",
    "subdomain": "Gives the pods their names.",
}
_CONTAINER_COMMENTS = {
    "image": "nodes.image, or --image",
    "command": "Runs the program with patched Keras, counts its steps, and reports its end by status and message.",
    "workingDir": "working_directory",
    "resources": "nodes: cpus, memory, gpus",
    "securityContext": f"Only {TEMPORARY}, {SHARED_MEMORY} and the volumes can be written to.",
    "terminationMessagePolicy": "If the first process could not report, the end of the log is its message.",
}


def make_metadata(export: Export, name: str, *, queued: bool = False) -> Manifest:
    """The metadata of one of the export's objects; `queued`: whether Kueue admits it."""
    labels: Manifest = make_labels(export.name)
    if queued and export.pods.queue is not None:
        labels[noted(QUEUE, "nodes.queue")] = export.pods.queue
    namespace = export.pods.namespace
    return {
        noted("name", "name"): name,
        **({noted("namespace", "nodes.namespace"): namespace} if namespace is not None else {}),
        "labels": labels,
    }


def make_pod_template(export: Export, role: Role, *, subdomain: bool = False) -> Manifest:
    """The template of a role's pods."""
    given = export.template.get("metadata") or {}
    made = make_pod_spec(
        export.pods if _computes(export, role) else export.pods.changed(gpus=0),
        export.template,
        command=[export.python, f"{FOLDER}/{ENTRY}", "pod"],
        grace_s=export.spec.timeouts.stop_grace_s + GRACE_S,
        env=make_variables(export, role),
        container=_make_container(export, role),
        pod={"subdomain": export.name} if subdomain else {},
        mounts=[*_make_mounts(export)],
    )
    first, *others = made["containers"]
    mounts = [_note_claim(mount) for mount in first["volumeMounts"]]
    comments = {**_CONTAINER_COMMENTS, "args": _name_fields(export)}
    first = note({**first, "name": export.container, "volumeMounts": mounts}, comments)
    # Where Istio is installed, TFJob's pods would get a proxy that never ends.
    annotations = {"sidecar.istio.io/inject": "false", **(given.get("annotations") or {})}
    labels = {**(given.get("labels") or {}), RUN: export.name, MANAGED_BY: "distlaunch"}
    return {
        "metadata": {"labels": labels, "annotations": annotations},
        "spec": {**note(made, _POD_COMMENTS), "containers": [first, *others]},
    }


def _computes(export: Export, role: Role) -> bool:
    return role.type in export.spec.rules.computes or role.type == "evaluator"


def _note_claim(mount: Manifest) -> Manifest:
    comments = {"name": "nodes.volumes, or --volume"} if str(mount["name"]).startswith(CLAIM) else {}
    return note(mount, comments)


def _name_fields(export: Export) -> str:
    """The names of the spec's fields from which the arguments are made."""
    spec = export.spec
    given = {
        "sync": spec.sync is not None,
        "timeouts.start_s, timeouts.stop_grace_s": True,
        "keras.patch": not spec.keras.patch,
        "progress": not spec.progress,
        "keep_own_tf_config": spec.keep_own_tf_config,
        "program": True,
    }
    return ", ".join(field for field, is_given in given.items() if is_given)


def _make_container(export: Export, role: Role) -> Manifest:
    directory = _directory(export)
    return {
        "image": export.pods.image,
        "command": [],
        "args": [literal(word) for word in make_arguments(export, role)],
        **({"workingDir": directory} if directory is not None else {}),
        "ports": [_make_port(export)],
        "securityContext": SECURE_CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _make_port(export: Export) -> Manifest:
    name = "tfjob-port" if export.kind == "tfjob" else "cluster"
    return {"name": name, "containerPort": export.port, "protocol": "TCP"}


def make_arguments(export: Export, role: Role) -> list[str]:
    """The words after `pod`: see `worker_entry.pod.entry`."""
    spec = export.spec
    rules, serves = spec.rules, role.type in spec.rules.serves
    words = ["--sync", f"{FOLDER}/{PROGRAM}", _home(spec.sync.to)] if spec.sync is not None else []
    if rules.collective and role.type in rules.decides and export.size > 1 and spec.timeouts.start_s:
        words += ["--start-timeout", f"{spec.timeouts.start_s:g}"]
    words += ["--stop-grace", f"{spec.timeouts.stop_grace_s:g}"]
    if not spec.keras.patch or not rules.patches_keras or serves:
        words.append("--no-keras-patch")
    if not spec.progress or serves:
        words.append("--no-progress")
    if spec.keep_own_tf_config:
        words.append("--keep-own-tf-config")
    if export.kind == "tfjob":
        words.append("--tfjob")
    return [*words, *_make_program(program_of(spec, role.type))]


def _make_program(program: Program) -> list[str]:
    before = {"module": ["-m"], "command": ["--"]}.get(program.kind, [])
    return [*before, program.target, *program.args]


def _home(path: str) -> str:
    """A path of the task with `~` replaced by the temporary folder, which is the task's home folder."""
    return TEMPORARY + path[1:] if path == "~" or path.startswith("~/") else path


def _directory(export: Export) -> str | None:
    return export.spec.working_directory if export.spec.sync is None else None


def _make_mounts(export: Export) -> Iterator[tuple[Manifest, Manifest]]:
    """Each volume, and where it is mounted."""
    yield (
        {"name": "files", "configMap": {"name": export.config_map}},
        {"name": "files", "mountPath": FOLDER, "readOnly": True},
    )
    yield TEMPORARY_VOLUME
    sync = export.spec.sync
    if sync is not None and not _home(sync.to).startswith(f"{TEMPORARY}/"):
        mount = {"name": "program", noted("mountPath", "sync.to"): _home(sync.to)}
        yield {"name": "program", "emptyDir": {}}, mount


def make_config_map(export: Export) -> Manifest:
    """The files of the pods."""
    comments = {ENTRY: "What runs around the program: distlaunch's worker_entry.", PROGRAM: "sync.path"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": make_metadata(export, export.config_map),
        "binaryData": note(export.files, comments),
    }


def make_network_policy(export: Export) -> Manifest:
    """Lets only pods of the same run, and the networks that the spec names, reach its tasks."""
    selector = {"matchLabels": {RUN: export.name}}
    own: Manifest = {noted("from", "Only the pods of the same run."): [{"podSelector": selector}]}
    port = {"port": export.port, "protocol": "TCP"}
    if not _opens_other_ports(export):
        own["ports"] = [port]
    ingress = [own]
    if export.spec.allow:
        blocks = [{"ipBlock": {"cidr": str(network)}} for network in export.spec.allow]
        ingress.append({noted("from", "allow"): blocks, "ports": [port]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": make_metadata(export, export.name),
        noted("spec", "guard"): {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _opens_other_ports(export: Export) -> bool:
    """Whether the tasks open ports that they choose themselves, as NCCL, gloo and PyTorch do."""
    spec = export.spec
    return spec.framework != "tensorflow" or (bool(export.pods.gpus) and spec.communication != "ring")
