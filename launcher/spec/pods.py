"""The pods that a run requests from Kubernetes as its nodes, as frozen values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from launcher.spec.fields import LIMITED_S, AtMost, FilledText, Seconds
from launcher.spec.parts import Model

KUBERNETES: Literal["kubernetes"] = "kubernetes"
"""As the `from` of a spec's nodes: pods that the run creates."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[
    str,
    StringConstraints(pattern=_QUANTITY, max_length=20),
    WithJsonSchema({"type": ["string", "number"], "pattern": _QUANTITY}),
]
"""An amount as Kubernetes writes it: `500m`, `4`, `16Gi`."""
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
_Resource = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]*$", max_length=253)]
_MountPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f:]*$")]


class PodsSpec(Model):
    """Pods that a run creates in a Kubernetes cluster, and removes when it ends."""

    image: FilledText
    """The container image of the pods, with Python 3.9 or newer and TensorFlow."""
    controller_image: FilledText | None = None
    """The image, with distlaunch and `kubectl`, in which `submit` runs distlaunch itself. Default: `image`."""
    python: FilledText | None = None
    """The Python interpreter in the image. Default: `python3`."""
    count: Annotated[int, Field(ge=1), AtMost(10_000, "no cluster starts more pods at once")] = 1
    """The number of pods."""
    workers_per_pod: Annotated[int, Field(ge=1), AtMost(1024, "no node has room for more")] = 1
    """The number of workers in each pod."""
    gpus: Annotated[int, Field(ge=0), AtMost(64, "no machine has more GPUs")] = 0
    """GPUs of each pod."""
    gpu_resource: _Resource = "nvidia.com/gpu"
    """The name of the Kubernetes resource for these GPUs."""
    cpus: Quantity | None = None
    """CPUs that each pod requests, like `4` or `500m`."""
    memory: Quantity | None = None
    """Memory that each pod requests and may use at most, like `16Gi`."""
    namespace: _Name | None = None
    """The namespace of the pods. Default: the context's namespace."""
    context: FilledText | None = None
    """The context of the kubeconfig to use. Default: the current one."""
    queue: _Name | None = None
    """The Kueue local queue that admits all pods at once."""
    priority_class: _Name | None = None
    """The priority class of the pods."""
    volumes: dict[_Name, _MountPath] = {}
    """Persistent volume claims, and the path at which each is mounted in the pods: `{checkpoints: /checkpoints}`."""
    template: FilledText | None = None
    """A file with a pod manifest for everything else: tolerations, node selectors, more volumes. The tasks run in its
    first container."""
    wait_s: Annotated[Seconds, LIMITED_S] = 0.0
    """How long to wait until all pods run; 0: no limit."""
