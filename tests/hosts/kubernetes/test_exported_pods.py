"""Exports on a real Kubernetes cluster of any version: it accepts the objects, and pods run and end as intended."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.hosts.exported import core_manifests, export, pods_of
from tests.harness.hosts.kubernetes import IMAGE, KubernetesCluster, find_cluster
from tests.harness.witness import wait_until

NAMESPACE = "distlaunch-export"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    cluster = find_cluster()
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=true")


def test_an_api_server_accepts_every_exported_object_of_a_built_in_kind(cluster: KubernetesCluster) -> None:
    objects = {}
    for manifest in core_manifests():
        metadata = {name: value for name, value in manifest["metadata"].items() if name != "namespace"}
        manifest = {**manifest, "metadata": metadata}
        if manifest["kind"] == "Pod":
            manifest["spec"] = {name: value for name, value in manifest["spec"].items() if name != "priorityClassName"}
        objects[json.dumps(manifest)] = manifest["kind"]
    assert set(objects.values()) == {"ConfigMap", "Job", "NetworkPolicy", "Pod", "Service"}
    # Without validation, kubectl leaves the fields to the server, and an old server drops newer fields.
    words = ["create", "--dry-run=server", "--validate=false", "-n", NAMESPACE, "-o", "name", "-f", "-"]
    taken = cluster.kubectl(
        *words, stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [*map(json.loads, objects)]})
    ).split()
    assert len(taken) == len(objects)


SAVES = """
import tensorflow as tf
alone = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
handler = tf.distribute.experimental.PreemptionCheckpointHandler(alone, tf.train.Checkpoint(), "/tmp/checkpoints")
raise SystemExit(42)
"""


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("import os; print(os.getuid())", 0, "succeeded (exit status 0)\n"),
        (
            "def load():\n    raise ValueError('batch 20 has no label')\n\nload()\n",
            1,
            "the task failed (exit status 1)\n/srv/job/train.py:2\nValueError: batch 20 has no label\n",
        ),
        ("open('/etc/mine', 'w')", 1, "OSError: [Errno 30] Read-only file system: '/etc/mine'\n"),
        (
            SAVES,
            42,
            "after a checkpoint was saved",
        ),
    ],
)
def test_an_exported_pod_ends_with_the_expected_status_and_message(
    cluster: KubernetesCluster, tmp_path: Path, source: str, status: int, message: str
) -> None:
    ended = run_pod(cluster, tmp_path, source)
    assert ended["exitCode"] == status, ended
    assert message in ended["message"]


def test_an_exported_pod_that_runs_out_of_memory_ends_with_status_137(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    assert run_pod(cluster, tmp_path, "bytearray(1 << 30)", memory="200Mi")["exitCode"] == 137


def test_a_deleted_pod_is_preempted_even_if_its_program_ignores_sigterm(
    cluster: KubernetesCluster, tmp_path: Path
) -> None:
    source = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(99)"
    )
    with begun_pod(cluster, tmp_path, source) as pod:
        wait_until(lambda: "up" in cluster.kubectl("logs", *pod, check=False), "the program runs")
        cluster.kubectl("delete", "pod", *pod, "--wait=false")
        ended = await_end(cluster, *pod)
    assert ended["exitCode"] == 143, ended
    assert "preempted: asked to stop (SIGKILL" in ended["message"]


def run_pod(cluster: KubernetesCluster, folder: Path, source: str, **nodes: str) -> Mapping[str, Any]:
    """Runs an export with one pod; returns the end of its container."""
    with begun_pod(cluster, folder, source, **nodes) as pod:
        return await_end(cluster, *pod)


@contextlib.contextmanager
def begun_pod(cluster: KubernetesCluster, folder: Path, source: str, **more: str) -> Iterator[tuple[str, str, str]]:
    """Starts the one pod of an export; yields kubectl's arguments for it. The ended pod stays until this exits."""
    program = folder / "program"
    program.mkdir()
    (program / "train.py").write_text(source)
    base = cluster.write_template(folder)
    nodes = {"from": "kubernetes", "image": IMAGE, "python": sys.executable, "namespace": NAMESPACE, **more}
    spec = {
        "name": "job",
        "nodes": {**nodes, "template": str(base)},
        "program": {"script": "train.py"},
        "sync": {"path": str(program), "to": "/srv/job"},
        "timeouts": {"stop_grace_s": "1"},
    }
    exported = export(json.dumps(spec))
    [template] = pods_of(exported.objects)
    # A bare pod, since an old Job, which ignores failure policies, removes its pods when it fails.
    metadata = {**template["metadata"], "name": "job", "namespace": NAMESPACE, "finalizers": ["distlaunch/test"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": [exported.objects["ConfigMap"], pod]})
    words = ("job", "-n", NAMESPACE)
    cluster.kubectl("create", "-f", "-", stdin=objects)
    try:
        yield words
    finally:
        cluster.kubectl("patch", "pod", *words, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
        cluster.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", "-", stdin=objects)


def await_end(cluster: KubernetesCluster, *pod: str) -> Mapping[str, Any]:
    def find() -> Mapping[str, Any]:
        return find_end(json.loads(cluster.kubectl("get", "pod", *pod, "-o", "json")))

    wait_until(lambda: bool(find()), "the container has ended")
    return find()


def find_end(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the pod's container ended; empty while it has not."""
    containers = pod["status"].get("containerStatuses", [])
    found: Mapping[str, Any] = containers[0]["state"].get("terminated", {}) if containers else {}
    return found
