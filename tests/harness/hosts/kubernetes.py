"""A Kubernetes cluster whose only node is this machine, with this machine's Python and TensorFlow mounted in its pods.

DISTLAUNCH_KUBERNETES names the cluster's folder: `kubeconfig` gives access to the cluster, `docker.sock` belongs to its
container engine, and NAME.pid has the pid of each of its daemons.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from tests.harness.places import ROOT
from tests.harness.polling import HANG_S, eventually
from tests.harness.witness import wait_until

IMAGE = "distlaunch-test-node:local"
FOLDER = "DISTLAUNCH_KUBERNETES"
MAY_SKIP = "DISTLAUNCH_NO_KUBERNETES"
LINKS = ("bin", "sbin", "lib", "lib64")
FOLDERS = ("dev", "etc", "home", "proc", "root", "sys", "tmp", "usr")


@dataclass(frozen=True)
class KubernetesCluster:
    """A cluster. `folder`: see the module."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {"KUBECONFIG": str(self.folder / "kubeconfig")}

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        """The output of `kubectl`."""
        done = subprocess.run(
            ["kubectl", *words],
            env={**os.environ, **self.env},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, *words: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", *words, "-o", "json"))["items"]
        return items

    def pods(self, phase: str = "") -> list[str]:
        """The names of our pods that are not being deleted."""
        found = self.show("pods", "--selector=app.kubernetes.io/managed-by=distlaunch")
        return [
            pod["metadata"]["name"]
            for pod in found
            if "deletionTimestamp" not in pod["metadata"] and (not phase or pod["status"].get("phase") == phase)
        ]

    def daemon(self, name: str) -> psutil.Process:
        return psutil.Process(int((self.folder / f"{name}.pid").read_text()))

    def restart(self, name: str, *, down_s: float = 0.0) -> None:
        """Stops a daemon and starts it again with the same command."""
        command = self.stop(name)
        if down_s:
            signal.sigtimedwait([], down_s)
        self.start(name, command)

    def stop(self, name: str) -> tuple[list[str], str]:
        """Stops a daemon; returns its command and its folder."""
        process = self.daemon(name)
        command = process.cmdline(), process.cwd()
        process.terminate()
        gone, _ = psutil.wait_procs([process], 20)
        if not gone:
            process.kill()
        return command

    def start(self, name: str, command: tuple[list[str], str]) -> None:
        words, folder = command
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (self.folder / f"{name}.pid").write_text(str(process.pid))

    def await_api(self) -> None:
        eventually(lambda: self.kubectl("get", "--raw", "/readyz"))

    def await_node(self) -> None:
        def is_ready() -> bool:
            return " Ready" in self.kubectl("get", "nodes", "--no-headers", check=False)

        wait_until(is_ready, "the node is ready")

    def await_empty(self) -> None:
        """Waits until no object of distlaunch is left."""
        kinds = "pods,jobs,configmaps,secrets,networkpolicies,roles,rolebindings,serviceaccounts"
        selector = "--selector=app.kubernetes.io/managed-by=distlaunch"
        # The API server may not answer for 30 s; a controller in a pod then asks a second time.
        wait_until(lambda: self.show(kinds, selector) == [], "no object of distlaunch is left")

    @contextlib.contextmanager
    def running_pod(self, folder: Path) -> Iterator[str]:
        """A waiting pod, with this folder mounted at the same path."""
        name = f"test-{secrets.token_hex(4)}"
        pod = json.loads(self.write_template(folder, folder).read_text())
        pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        pod["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
        pod["spec"]["containers"][0] |= {"image": IMAGE, "command": ["sleep", "600"]}
        self.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        self.kubectl("wait", "--for=condition=Ready", f"--timeout={HANG_S:g}s", f"pod/{name}")
        try:
            yield name
        finally:
            self.kubectl("delete", "pod", name, "--grace-period=0", "--force")

    def write_template(
        self, folder: Path, *shared: Path, env: Mapping[str, str] = MappingProxyType({}), as_root: bool = True
    ) -> Path:
        """Writes the manifest of a pod with this machine's programs and, writable, these folders.

        `env`: variables of all processes in the pod. `as_root`: whether they may write to folders of this user.
        """
        python = [sys.prefix, sys.base_prefix]
        places = [*dict.fromkeys(["/usr", "/etc", *python, str(ROOT)])]
        volumes: list[dict[str, Any]] = []
        mounts: list[dict[str, Any]] = []
        for index, place in enumerate([*places, *map(str, shared)]):
            volumes.append({"name": f"v{index}", "hostPath": {"path": place}})
            mounts.append({"name": f"v{index}", "mountPath": place, "readOnly": index < len(places)})
        variables = [{"name": name, "value": value} for name, value in env.items()]
        container = {"name": "node", "imagePullPolicy": "Never", "volumeMounts": mounts, "env": variables}
        path = folder / "pod.json"
        user = {"securityContext": {"runAsUser": os.getuid()}} if as_root else {}
        path.write_text(json.dumps({"spec": {**user, "containers": [container], "volumes": volumes}}))
        return path


def find_cluster() -> KubernetesCluster:
    """The cluster, with the image of the tests; skips the test if there is no cluster."""
    folder = os.environ.get(FOLDER, "")
    if not folder:
        message = f"no cluster: {FOLDER} names none"
        assert os.environ.get(MAY_SKIP) or not os.environ.get("DISTLAUNCH_NO_SKIPS"), message
        pytest.skip(message)
    cluster = KubernetesCluster(Path(folder))
    _make_image(cluster)
    return cluster


def _make_image(cluster: KubernetesCluster) -> None:
    """Makes an image of empty folders, in which the pods mount this machine's."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name in LINKS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(entry)
    run_docker(cluster, "import", "-", IMAGE, stdin=tar.getvalue())


def run_docker(cluster: KubernetesCluster, *words: str, stdin: bytes = b"") -> str:
    """The output of Docker's client, connected to the cluster's engine."""
    env: Mapping[str, str] = {**os.environ, "DOCKER_HOST": f"unix://{cluster.folder}/docker.sock"}
    done = subprocess.run(["docker", *words], env=env, input=stdin, capture_output=True, timeout=60, check=True)
    return done.stdout.decode()
