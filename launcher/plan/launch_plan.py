"""The launch plan of a run: the node, address, port, GPUs, environment and TF_CONFIG of every task."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from launcher.plan.tf_config import TfConfig, render
from launcher.spec.redaction import REDACTED
from launcher.spec.strategies import RULES, StrategyRules
from launcher.tasks import TaskId
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.values import Program, TaskRequest


@dataclass(frozen=True)
class TaskPlan:
    """One task as it will be started.

    `env`, without TF_CONFIG, is added to the node's own environment, except for names in `defaults` that are set there;
    the values of the names in `secrets` are never shown. `port` is held for the task even if the task never opens it.
    `directory` is the task's working directory.
    """

    task: TaskId
    node: str
    directory: str
    python: str
    address: str
    port: int
    explicit_port: bool
    program: Program = field(repr=False)
    tf_config: TfConfig | None
    env: Mapping[str, str] = field(repr=False)
    secrets: frozenset[str]
    patch_keras: bool
    progress: bool = True
    collective: bool = True
    """Whether the tasks synchronize in every step, so that all wait for each other."""

    opens_port: bool = False
    """Whether the framework starts a server on the port."""
    reuse_address: bool = False
    """Whether the program binds its port with SO_REUSEADDR."""
    keep_own_tf_config: bool = False
    """Whether a TF_CONFIG that the program sets takes effect."""
    other_addresses: tuple[str, ...] = ()
    """The other candidate addresses, if the checks have not chosen one yet."""
    defaults: frozenset[str] = frozenset()

    @property
    def request(self) -> TaskRequest:
        """The request to the task's node to prepare the task."""
        port = self.port if self.explicit_port else 0
        return TaskRequest(str(self.task), self.program, port, reuse_address=self.reuse_address)

    @property
    def whole_env(self) -> dict[str, str]:
        """The environment with TF_CONFIG, which has the addresses of all tasks."""
        return {**self.env, **({} if self.tf_config is None else {environment.TF_CONFIG: render(self.tf_config)})}

    def shown_env(self) -> dict[str, str]:
        """The environment without TF_CONFIG, its secrets redacted."""
        return {name: REDACTED if name in self.secrets else value for name, value in self.env.items()}


@dataclass(frozen=True)
class LaunchPlan:
    """The tasks to start on each node. `directory` is the working directory, except on nodes to which it is sent."""

    name: str
    strategy: str
    directory: str
    tasks: tuple[TaskPlan, ...]
    rules: StrategyRules = RULES["multi_worker_mirrored"]
    warnings: tuple[str, ...] = ()
    routes: Mapping[str, str] = field(default_factory=dict)
    """With a tunnel, the host that each address in TF_CONFIG stands for."""
    unasked: tuple[str, ...] = ()
    """The nodes whose cores and GPUs are not known yet; empty if no node's are known."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.by_node)

    @cached_property
    def by_node(self) -> dict[str, list[TaskPlan]]:
        """The tasks of each node."""
        found: dict[str, list[TaskPlan]] = {}
        for task in self.tasks:
            found.setdefault(task.node, []).append(task)
        return found

    def find_readers(self, stdin: Literal["chief", "all", "none"]) -> frozenset[TaskId]:
        """The tasks that read from stdin; `stdin`: the spec's field."""
        if stdin == "none":
            return frozenset()
        if stdin == "all":
            run = (task.task for task in self.tasks)
            return frozenset(task for task in run if task.type not in self.rules.serves and not task.is_auxiliary)
        deciding = (task.task for task in self.tasks if task.task.type in self.rules.decides)
        return frozenset(sorted(deciding, key=lambda task: (task.type != "chief", task.index))[:1])
