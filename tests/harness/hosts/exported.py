"""Exports of many specs, as `distlaunch export kubernetes` prints them."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import yaml

from launcher.commands.export import read_export
from launcher.kubernetes.export import render_export
from launcher.kubernetes.exported import KINDS, Export, Kind
from launcher.spec.loading import parse_spec
from launcher.spec.pods import PodsSpec

PODS = "nodes: {from: kubernetes, image: registry/train:1, count: 3}\n"
TWO_MACHINES = "nodes: [{host: gpu-a, tasks: {worker: 2}, gpus_per_worker: 2}, {host: gpu-b, gpus_per_worker: 2}]\n"
WITH_CHIEF = (
    "nodes: [{host: gpu-a, tasks: {chief: 1, evaluator: 1}}, {host: gpu-b, tasks: {worker: 2}}]\n"
    "checkpoint_directory: /checkpoints\n"
)
SERVERS = (
    "nodes: [{host: gpu-a, tasks: {chief: 1, ps: 2}}, {host: gpu-b, tasks: {worker: 3, evaluator: 1}}]\n"
    "strategy: parameter_server\nrestart: {max_restarts: 2}\n"
)
EVERYTHING = """\
name: Mnist.large_run
nodes:
  from: kubernetes
  image: registry/train:1
  count: 4
  gpus: 8
  gpu_resource: amd.com/gpu
  cpus: 500m
  memory: 16Gi
  namespace: team
  queue: team-a
  priority_class: high
  volumes: {checkpoints: /checkpoints, data.v2: /data}
program: {script: /app/train.py, args: [--epochs, "3", --note, "$(HOME) costs $5"]}
devices: 2
communication: ring
log_directory: /checkpoints/logs
checkpoint_directory: /checkpoints/mnist
env: {MODE: "a $(HOME) $$", MY_TOKEN: hunter2, EMPTY: ""}
env_from: [WANDB_API_KEY, USER]
allow: [10.0.0.0/24, "fd00::/8"]
keras: {patch: false}
progress: false
keep_own_tf_config: true
restart: {max_restarts: 5}
timeouts: {stop_grace_s: 90, start_s: 0}
"""

VOLUME = {"checkpoints": "/checkpoints"}
SPECS: Mapping[str, str] = {
    "pods": PODS,
    "restarted": f"{PODS}restart: {{max_restarts: 3}}\n",
    "one pod": "nodes: {from: kubernetes, image: registry/train:1}\n",
    "everything": EVERYTHING,
    "machines": f"{TWO_MACHINES}program: {{module: train.main, args: [-v]}}\nrestart: {{max_restarts: 1}}\n",
    "command": f"{PODS}program: {{command: [bash, -c, 'python train.py $EPOCHS']}}\nworking_directory: /app\n",
    "unguarded": f"{PODS}guard: off\n",
    "mirrored": "nodes: {from: kubernetes, image: registry/train:1, gpus: 4}\nstrategy: mirrored\n",
    "torch": f"{PODS}framework: torch\nprogram: {{script: train.py}}\n",
    "jax": f"{PODS}framework: jax\ndevices: 2\n",
    "chief": WITH_CHIEF,
    "servers": SERVERS,
}
"""Specs that can be exported, at least as a JobSet."""
KINDS_OF: Mapping[str, tuple[Kind, ...]] = {
    "torch": ("jobset", "job", "trainjob"),
    "jax": ("jobset", "job", "trainjob"),
    "chief": ("jobset", "tfjob"),
    "servers": ("jobset", "tfjob"),
}
"""The kinds of those specs that cannot be exported as every kind."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster loader, if PyYAML was built with it."""
CORE = ("ConfigMap", "Job", "NetworkPolicy", "Service")
CASES = [(name, kind) for name in SPECS for kind in KINDS_OF.get(name, KINDS)]


class Exported(NamedTuple):
    """One spec as one kind: the text, and its objects by their kinds."""

    text: str
    objects: Mapping[str, Any]


def make(text: str, kind: Kind = "jobset") -> Export:
    """The export of a spec, with an image and a volume added if the spec lacks them."""
    spec = parse_spec(textwrap.dedent(text).encode())
    image = None if isinstance(spec.source, PodsSpec) else "registry/other:2"
    return read_export(spec, kind, image, VOLUME if spec.checkpoint_directory == "/checkpoints" else {})


def export(text: str, kind: Kind = "jobset") -> Exported:
    rendered = render_export(make(text, kind))
    objects = [document for document in yaml.load_all(rendered, Loader=LOADER) if document is not None]
    return Exported(rendered, {each["kind"]: each for each in objects})


@cache
def export_case(name: str, kind: Kind) -> Exported:
    return export(SPECS[name], kind)


def all_manifests() -> Iterator[dict[str, Any]]:
    """Every object of every case."""
    for name, kind in CASES:
        yield from export_case(name, kind).objects.values()


def core_manifests() -> Iterator[dict[str, Any]]:
    """Objects that an API server accepts without any extension: those of its own kinds, and each pod on its own."""
    for name, kind in CASES:
        objects = export_case(name, kind).objects
        yield from (manifest for manifest in objects.values() if manifest["kind"] in CORE)
        for place, template in enumerate(pods_of(objects)):
            metadata = {**template["metadata"], "name": f"pod-{place}"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def jobs_of(objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The specs of all Jobs."""
    for kind, manifest in objects.items():
        if kind == "Job":
            yield manifest["spec"]
        if kind == "JobSet":
            yield from (job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"])
        if kind == "TrainingRuntime":
            yield from (job["template"]["spec"] for job in manifest["spec"]["template"]["spec"]["replicatedJobs"])


def pods_of(objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates of all pods."""
    yield from (job["template"] for job in jobs_of(objects))
    if "TFJob" in objects:
        yield from (role["template"] for role in objects["TFJob"]["spec"]["tfReplicaSpecs"].values())


def env_of(exported: Exported, index: int, place: int = 0) -> dict[str, str]:
    """The variables of a pod with this index, expanded as Kubernetes does, without those from a Secret."""
    objects = exported.objects
    if "TrainJob" in objects:
        listed = objects["TrainJob"]["spec"]["trainer"]["env"]
    else:
        listed = [*pods_of(objects)][place]["spec"]["containers"][0]["env"]
    env: dict[str, str] = {}
    for each in listed:
        source = each.get("valueFrom", {})
        if "fieldRef" in source:
            env[each["name"]] = str(index) if "index" in source["fieldRef"]["fieldPath"] else "0"
        elif not source:
            env[each["name"]] = expand(each["value"], env)
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """A value as Kubernetes expands it: `$(NAME)` is the value of an earlier variable, and `$$` is `$`."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_]\w*)\)", lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text
    )


def read_file(exported: Exported, name: str) -> bytes:
    """A file of the ConfigMap."""
    return base64.b64decode(exported.objects["ConfigMap"]["binaryData"][name])
