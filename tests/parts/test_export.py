"""`distlaunch export kubernetes` writes objects that the API accepts, with rules that do what the spec says."""

from __future__ import annotations

import functools
import io
import json
import re
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.kubernetes.exported import Kind
from tests.harness.hosts.exported import (
    CASES,
    PODS,
    core_manifests,
    export,
    export_case,
    jobs_of,
    pods_of,
    read_file,
)


def synced(folder: Path, **fields: str) -> str:
    more = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return f"{PODS}sync: {{path: {folder}, to: /srv/job}}\nprogram: {{script: train.py}}\n{more}"


def test_a_small_sync_folder_is_in_the_exported_config_map(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link.py").symlink_to("train.py")
    exported = export(synced(tmp_path))
    with zipfile.ZipFile(io.BytesIO(read_file(exported, "folder.zip"))) as bundle:
        assert bundle.namelist() == ["link.py", "run.sh", "train.py"]
        assert bundle.read("link.py") == b"print('hello')\n"
        assert [each.external_attr >> 16 for each in bundle.infolist()] == [0o644, 0o755, 0o644]
    [template] = pods_of(exported.objects)
    [container] = template["spec"]["containers"]
    assert container["args"][:3] == ["--sync", "/distlaunch/folder.zip", "/srv/job"]
    assert "/srv/job" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("size", [1 << 20, 40 << 20])
def test_a_sync_folder_too_large_for_a_config_map_is_rejected(tmp_path: Path, size: int) -> None:
    (tmp_path / "data.bin").write_bytes(Random(1).randbytes(size))  # noise, which does not compress
    with pytest.raises(UsageError, match=r"sync\.path.* too large for a ConfigMap") as raised:
        export(synced(tmp_path))
    assert "--image or --volume" in raised.value.hint


MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""The trainer's classes. The definitions take a second to import, so only the checks import them."""


# --- what the API accepts ---


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_exported_objects_have_only_fields_that_their_api_defines(name: str, kind: Kind) -> None:
    objects = export_case(name, kind).objects
    assert objects.keys() >= {"ConfigMap"}
    for manifest in objects.values():
        check(manifest)


def test_core_manifests_have_only_fields_of_a_plain_api_server() -> None:
    kinds = set()
    for manifest in core_manifests():
        check(manifest)
        kinds.add(manifest["kind"])
    assert kinds == {"ConfigMap", "Job", "NetworkPolicy", "Pod", "Service"}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_jobs_and_pods_nested_in_exported_objects_are_valid(name: str, kind: Kind) -> None:
    objects = export_case(name, kind).objects
    for spec in jobs_of(objects):
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec})
    pods = [*pods_of(objects)]
    assert pods
    for template in pods:
        check({"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template["metadata"], "name": "a"}})


@pytest.mark.parametrize("wrong", ["replicatedJob", "maxRestart", "backoff"])
def test_the_manifest_check_finds_an_unknown_field(wrong: str) -> None:
    manifest = json.loads(json.dumps(export_case("restarted", "jobset").objects["JobSet"]))
    spec = manifest["spec"]
    {"replicatedJob": spec, "maxRestart": spec["failurePolicy"], "backoff": spec["replicatedJobs"][0]}[wrong][wrong] = 1
    with pytest.raises(AssertionError):
        check(manifest)


def test_the_manifest_check_finds_a_wrong_type_in_a_tf_job() -> None:
    manifest = json.loads(json.dumps(export_case("pods", "tfjob").objects["TFJob"]))
    manifest["spec"]["tfReplicaSpecs"]["Worker"]["replicas"] = "3"
    with pytest.raises(AssertionError):
        check(manifest)


def check(manifest: dict[str, Any]) -> None:
    """Checks an object against its definition."""
    kind = manifest["kind"]
    if kind in MODELS:
        from kubeflow_trainer_api import models

        model = getattr(models, MODELS[kind])
        assert model.from_dict(manifest).to_dict() == manifest  # the model drops unknown fields
    elif kind == "TFJob":
        check_swagger(manifest, "KubeflowOrgV1TFJob")
    else:
        import kubernetes_validate

        kubernetes_validate.validate(manifest, newest_version(), strict=True)


@functools.cache
def newest_version() -> str:
    """The newest Kubernetes version with a schema; cached, since the lookup scans a folder."""
    import kubernetes_validate

    newest: str = kubernetes_validate.latest_version()
    return newest


def check_swagger(value: Any, kind: str) -> None:
    """Checks a value against the models of the training operator."""
    from kubeflow.training import models

    if inner := re.fullmatch(r"list\[(\w+)\]", kind):
        for each in value:
            check_swagger(each, inner[1])
    elif inner := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        for each in value.values():
            check_swagger(each, inner[1])
    elif model := getattr(models, kind, None):
        types = {model.attribute_map[name]: named for name, named in model.openapi_types.items()}
        assert value.keys() <= types.keys(), kind
        for name, each in value.items():
            check_swagger(each, types[name])
    else:
        assert type(value).__name__ == kind, (kind, value)
