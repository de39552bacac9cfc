"""`distlaunch submit` for pods: creates the Kubernetes job in which distlaunch runs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from launcher.commands.export import pack_program
from launcher.errors import UsageError
from launcher.kubernetes.calls import Kubectl
from launcher.kubernetes.controller import ARCHIVE, FILES, FILES_LIMIT, SPEC, TEMPLATE, ControllerJob
from launcher.kubernetes.pod import make_name
from launcher.plan.rendering import render_spec
from launcher.rundir.names import current_directory, make_run_id
from launcher.sources.kubernetes import read_pod_template
from launcher.sources.node_list import preview_nodes
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import Nodes
from launcher.spec.pods import PodsSpec
from launcher.spec.redaction import is_secret
from worker_entry.protocol.frozen import dataclass

CONTROLLER_NAME_LENGTH = 57
"""Most characters of the job's name; the name of its pod also has a suffix."""


@dataclass(frozen=True)
class SubmittedController:
    """The job, and the `kubectl` command for its context and namespace."""

    job: str
    kubectl: Kubectl


def prepare(spec: ClusterSpec, environ: Mapping[str, str], *, checks: bool) -> ControllerJob:
    """The job, with its files and secrets.

    Args:
        spec: a spec whose nodes are pods.
        environ: the environment with the values of `env_from`.
        checks: whether the nodes are checked before the start.

    Raises:
        UsageError: the spec cannot be run in a pod, or its files are too large.
    """
    source = spec.source
    assert isinstance(source, PodsSpec)
    preview_nodes(spec)  # raises for contradictions
    cwd = str(current_directory())
    template = read_pod_template(source, cwd)
    secrets = {name: value for name, value in spec.env.items() if is_secret(name, value)}
    inner = source.changed(context=None, template=f"{FILES}/{TEMPLATE}" if template else None)
    files = {TEMPLATE: json.dumps(template).encode()} if template else {}
    if spec.sync is not None:
        files[ARCHIVE] = pack_program(spec.sync)
    given = spec.changed(
        nodes=Nodes((), inner),
        env={name: value for name, value in spec.env.items() if name not in secrets},
        env_from=[*spec.env_from, *secrets],
        **({"sync": spec.sync.changed(path=".")} if spec.sync is not None else {}),
    )
    files[SPEC] = render_spec(given).encode()
    size = sum(map(len, files.values()))
    if size > FILES_LIMIT:
        raise UsageError(
            f"the spec and the folder of `sync:` are {size:,} bytes; the limit for a job is {FILES_LIMIT:,}",
            hint="exclude files with `sync.exclude`, or put the program into the image",
        )
    return ControllerJob(
        name=make_name(make_run_id(spec.name), CONTROLLER_NAME_LENGTH),
        source=source,
        files=files,
        secrets={**{name: environ[name] for name in spec.env_from if name in environ}, **secrets},
        template=template,
        options=[] if checks else ["--no-check"],
        grace_s=spec.timeouts.stop_grace_s,
    )


def render(job: ControllerJob) -> str:
    """The manifests as `kubectl create` takes them, without the values of secrets."""
    rest = [manifest for manifest in job.make_rest() if manifest["kind"] != "Secret"]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [*rest, job.job]}, indent=2) + "\n"


def submit(job: ControllerJob) -> SubmittedController:
    """Creates the job completely or not at all.

    Raises:
        KubernetesError: the cluster rejects one of its manifests.
    """
    kubectl = Kubectl(job.source.context, job.source.namespace)
    kubectl.create(job.job)
    try:
        uid = str(kubectl.show("job", job.name)["metadata"]["uid"])
        for manifest in job.make_rest(uid):
            kubectl.create(manifest)
    except BaseException:
        kubectl.call("delete", "job", job.name, "--wait=false")
        raise
    return SubmittedController(job.name, kubectl)
