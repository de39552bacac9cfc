"""The job in which distlaunch itself runs, so that it continues without the machine that submitted it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.kubernetes.pod import HOME, TEMPORARY_VOLUME, Manifest, make_labels, make_pod_spec
from launcher.own_command import CODE
from launcher.spec.nodes import PYTHON
from launcher.spec.pods import PodsSpec
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass

FILES = "/distlaunch/files"
"""Where the files of the job are."""
PROJECT = "/distlaunch/project"
"""Where the program's folder is unpacked."""
ARCHIVE, SPEC, TEMPLATE = "project.zip", "spec.json", "pod.json"
ENDING_S = 120.0
"""How much longer than its tasks the controller may take to end, because it removes the pods."""
FILES_LIMIT = 900_000
"""Bytes of all files: the API server takes objects of 1 MiB, and base64 adds a third."""
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_START = f"""\
import os, sys, zipfile
os.makedirs({PROJECT!r}, exist_ok=True)
os.chdir({PROJECT!r})
if os.path.exists({FILES + "/" + ARCHIVE!r}):
    with zipfile.ZipFile({FILES + "/" + ARCHIVE!r}) as archive:
        for entry in archive.infolist():
            os.chmod(archive.extract(entry), entry.external_attr >> 16)
os.execv(sys.executable, [sys.executable, "-c", {CODE!r}, "up", "--no-live", *sys.argv[1:], {FILES + "/" + SPEC!r}])
"""
_RULES: Sequence[Mapping[str, Sequence[str]]] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "delete"]},
)
"""All permissions that a run needs in its namespace."""


@dataclass(frozen=True, kw_only=True)
class ControllerJob:
    """The job, and the objects that belong to it and are deleted with it. `secrets`: variables of its environment."""

    name: str
    source: PodsSpec
    files: Mapping[str, bytes]
    secrets: Mapping[str, str]
    template: Mapping[str, Any]
    options: Sequence[str]
    grace_s: float

    @property
    def job(self) -> Manifest:
        """The job, which comes first: the other objects name it as their owner."""
        bare = PodsSpec(image=self.source.controller_image or self.source.image)
        pod = make_pod_spec(
            bare,
            self.template,
            command=[self.source.python or PYTHON, "-c", _START, *self.options],
            grace_s=self.grace_s + ENDING_S,
            env=[
                {"name": environment.OWNER_NAME, "value": self.name},
                {
                    "name": environment.OWNER_UID,
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}},
                },
                {"name": "PYTHONUNBUFFERED", "value": "1"},
                {"name": "HOME", "value": "/distlaunch"},
                {"name": "USER", "value": HOME["USER"]},
            ],
            mounts=[
                TEMPORARY_VOLUME,
                ({"name": "home", "emptyDir": {}}, {"name": "home", "mountPath": "/distlaunch"}),
                (
                    {"name": "files", "configMap": {"name": self.name}},
                    {"name": "files", "mountPath": FILES, "readOnly": True},
                ),
                (
                    {"name": "account", "projected": {"sources": _make_account()}},
                    {"name": "account", "mountPath": _ACCOUNT, "readOnly": True},
                ),
            ],
        )
        if self.secrets:
            pod["containers"][0]["envFrom"] = [{"secretRef": {"name": self.name}}]
        pod["serviceAccountName"] = self.name
        spec = {"backoffLimit": 0, "template": {"metadata": {"labels": make_labels(self.name)}, "spec": pod}}
        return self._make("batch/v1", "Job", {"spec": spec})

    def make_rest(self, uid: str | None = None) -> list[Manifest]:
        """The objects that belong to the job; `uid`: the job's, None if the job does not exist yet."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": uid} if uid is not None else None
        rbac = "rbac.authorization.k8s.io"
        subject = {"kind": "ServiceAccount", "name": self.name}
        role = {"apiGroup": rbac, "kind": "Role", "name": self.name}
        rest = [
            self._make("v1", "ServiceAccount", {}, owner),
            self._make(f"{rbac}/v1", "Role", {"rules": [*_RULES]}, owner),
            self._make(f"{rbac}/v1", "RoleBinding", {"subjects": [subject], "roleRef": role}, owner),
            self._make("v1", "ConfigMap", {"binaryData": {k: _encode(data) for k, data in self.files.items()}}, owner),
        ]
        if self.secrets:
            data = {name: _encode(value.encode()) for name, value in self.secrets.items()}
            rest.append(self._make("v1", "Secret", {"data": data}, owner))
        return rest

    def _make(
        self, version: str, kind: str, body: Mapping[str, Any], owner: Mapping[str, Any] | None = None
    ) -> Manifest:
        owners = {} if owner is None else {"ownerReferences": [owner]}
        metadata = {"name": self.name, "labels": make_labels(self.name), **owners}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _make_account() -> list[Manifest]:
    """The account's token, as Kubernetes mounts it unless that is turned off."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    return [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
