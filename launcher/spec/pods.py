"""What a run asks Kubernetes for, as frozen values: the pods that are its nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from launcher.spec.fields import LIMITED_S, AtMost, FilledText, Seconds
from launcher.spec.parts import Model

KUBERNETES: Literal["kubernetes"] = "kubernetes"
"""As the `from` of a spec's nodes: pods that the run makes."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[
    str,
    StringConstraints(pattern=_QUANTITY, max_length=20),
    WithJsonSchema({"type": ["string", "number"], "pattern": _QUANTITY}),
]
"""An amount as Kubernetes writes it: `500m`, `4`, `16Gi`."""
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
_Resource = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9./_-]*$", max_length=253)]
_MountPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00:]*$")]


class PodsSpec(Model):
    """Pods that a run makes in a Kubernetes cluster, and removes at its end."""

    image: FilledText
    """The container image of the pods; it has Python 3.9 or newer, and TensorFlow."""
    controller_image: FilledText | None = None
    """The image in which `submit` runs distlaunch itself; has it and `kubectl`. Default: `image`."""
    python: FilledText | None = None
    """The Python interpreter in the image. Default: `python3`."""
    count: Annotated[int, Field(ge=1), AtMost(10_000, "no cluster starts more pods at once")] = 1
    """How many pods."""
    workers_per_pod: Annotated[int, Field(ge=1), AtMost(1024, "no node has room for more")] = 1
    """How many workers run in each of them."""
    gpus: Annotated[int, Field(ge=0), AtMost(64, "no machine has more GPUs")] = 0
    """GPUs of each pod."""
    gpu_resource: _Resource = "nvidia.com/gpu"
    """What Kubernetes calls them."""
    cpus: Quantity | None = None
    """CPUs that each pod asks for, like `4` or `500m`."""
    memory: Quantity | None = None
    """Memory that each pod asks for and may use, like `16Gi`."""
    namespace: _Name | None = None
    """The namespace of the pods. Default: that of the context."""
    context: FilledText | None = None
    """The context of the kubeconfig to use. Default: the current one."""
    queue: _Name | None = None
    """The local queue of Kueue that admits the pods, all at once."""
    priority_class: _Name | None = None
    """Their priority class."""
    volumes: dict[_Name, _MountPath] = {}
    """Persistent volume claims, and where in the pods they are mounted: `{checkpoints: /checkpoints}`."""
    template: FilledText | None = None
    """A file with a pod's manifest, for all else: tolerations, node selectors, more volumes. Its first container is
    that of the tasks."""
    wait_s: Annotated[Seconds, LIMITED_S] = 0.0
    """How long to wait until all pods run; 0: as long as it takes."""
