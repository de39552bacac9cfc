"""The data of an export, for all kinds of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from launcher.plan.tf_config import format_address
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.tasks import TaskId, TaskType
from worker_entry.protocol.frozen import dataclass, field

Kind = Literal["jobset", "job", "tfjob", "trainjob"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NAME_LENGTH = 40
"""The most characters of a run's name: pod names add a role, two numbers and a suffix, and have at most 63."""


@dataclass(frozen=True)
class Role:
    """The pods of one task type, with one task each."""

    type: TaskType
    count: int


@dataclass(frozen=True, kw_only=True)
class Export:
    """A spec to export.

    `name`: the name from which the objects' names are made. `pods`: the settings of each pod. `template`: the user's
    pod manifest. `files`: the contents of the ConfigMap. `python`: the interpreter in the image. `port`: the port of
    each task. `env`: the variables that the spec sets.
    """

    name: str
    kind: Kind
    spec: ClusterSpec
    pods: PodsSpec
    roles: tuple[Role, ...]
    python: str
    port: int
    env: Mapping[str, str] = field(repr=False)
    template: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """The number of tasks."""
        return sum(role.count for role in self.roles)

    @property
    def config_map(self) -> str:
        return f"{self.name}-files"

    @property
    def secret(self) -> str:
        return f"{self.name}-env"

    @property
    def container(self) -> str:
        """The name of the container that runs the task; some kinds' controllers expect a certain name."""
        return {"tfjob": "tensorflow", "trainjob": "node"}.get(self.kind, "task")

    def host(self, task: TaskId) -> str:
        """The host name at which other tasks reach the task's pod; not for a TFJob, which names its pods itself."""
        pod = {"job": f"{self.name}-{task.index}", "trainjob": f"{self.name}-node-0-{task.index}"}
        return f"{pod.get(self.kind, f'{self.name}-{task.type}-0-{task.index}')}.{self.name}"

    def addresses(self) -> dict[TaskId, str]:
        """The address of every task."""
        tasks = [TaskId(role.type, index) for role in self.roles for index in range(role.count)]
        return {task: format_address(self.host(task), self.port) for task in tasks}
