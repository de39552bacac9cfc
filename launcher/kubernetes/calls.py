"""Asks a Kubernetes cluster through `kubectl`, which knows how its users log in."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from launcher import helpers
from launcher.errors import DistlaunchError
from launcher.kubernetes.pod import Manifest
from launcher.program_calls import call_program
from worker_entry.protocol.frozen import dataclass

POD_GONE = re.compile(r"\(NotFound\): pods|(?P<ended>completed pod|current phase is (?:Failed|Succeeded))")
"""`kubectl exec`'s error for a pod that is gone. A pod deleted by force may still run on its machine."""
ANSWER_S = 30.0
"""How long an answer may take: the API server may be starting."""


class KubernetesError(DistlaunchError):
    """Kubernetes refuses a request of a run, cannot provide its pods, or does not answer."""

    reference = "kubernetes"

    def says(self, words: str) -> bool:
        """Whether the answer contains these words."""
        return any(words in line for line in self.evidence)


class NotFoundError(KubernetesError):
    """There is no such object."""


@dataclass(frozen=True)
class Kubectl:
    """Runs `kubectl`; `context` and `namespace` default to those of the kubeconfig."""

    context: str | None = None
    namespace: str | None = None

    @property
    def words(self) -> list[str]:
        """The program with its general options."""
        given = {"context": self.context, "namespace": self.namespace}
        return ["kubectl", *(f"--{name}={value}" for name, value in given.items() if value is not None)]

    def call(self, *words: str, stdin: str | None = None, limit_s: float = ANSWER_S) -> str:
        """Runs a command and returns its output.

        Raises:
            NotFoundError: the command asks for an object that does not exist.
            KubernetesError: the cluster refuses the command, or does not answer.
        """
        try:
            return call_program(
                [*self.words, *words],
                KubernetesError,
                stdin=stdin,
                limit_s=limit_s,
                name=f"kubectl {words[0]}",
                missing="install kubectl, which reaches the cluster through your kubeconfig",
            )
        except KubernetesError as error:
            if error.says("(NotFound)"):
                raise NotFoundError(error.message, evidence=error.evidence) from None
            raise

    def show(self, *words: str) -> Mapping[str, Any]:
        """Returns an object, or a list of objects.

        Raises:
            NotFoundError: the object does not exist.
            KubernetesError: the cluster does not answer.
        """
        shown: Mapping[str, Any] = json.loads(self.call("get", *words, "--output=json"))
        return shown

    def create(self, manifest: Manifest) -> None:
        """Creates an object.

        Raises:
            KubernetesError: the cluster refuses the object.
        """
        self.call("create", "--filename=-", "--output=name", stdin=json.dumps(manifest))

    def watch(self, kind: str, selector: str) -> subprocess.Popen[bytes]:
        """A process that prints objects and their changes until the connection ends: JSON with `type` and `object`."""
        options = [f"--selector={selector}", "--watch", "--output-watch-events", "--output=json"]
        return helpers.start(
            [*self.words, "get", kind, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
