"""The parts of the plan that `decide` uses: the limits, and which tasks count for what.

|                          | trainers                         | servers                        | others          |
|--------------------------|----------------------------------|--------------------------------|-----------------|
| it fails                 | the attempt fails                | fails until all trainers ended | nothing follows |
| it ends with status 0    | succeeds, once all have          | fails until all trainers ended | nothing follows |
| its node is lost, breaks | fails, unless its trainers ended | fails until all trainers ended | nothing follows |
| it reports or writes     | progress                         | nothing follows                | nothing follows |

Trainers decide and run the program: a chief, workers. Servers are the workers and parameter servers of a chief. The
others watch: evaluators, and auxiliary tasks such as TensorBoard. Before the start, every node counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from launcher.spec.strategies import RULES, StrategyRules
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class AttemptPolicy:
    """The parts of the plan that `decide` uses. Durations are in seconds; 0: no limit."""

    nodes: Mapping[str, frozenset[TaskId]]
    forming: frozenset[TaskId]
    """The tasks that open a port when the cluster forms."""
    start_s: float
    drain_s: float
    stop_grace_s: float
    strategy: StrategyRules = RULES["multi_worker_mirrored"]
    scripts: frozenset[TaskId] = frozenset()
    """The tasks that run a script or a module: these report how they start. A command may never report anything."""
    max_individual_restarts: int = 0
    """How often each task may restart individually, if its type allows that."""
    keeps_auxiliary: bool = False
    """Whether auxiliary tasks stay after the success of the others, until the user stops them."""
    stall_s: float | None = None
    """How long a running cluster may go without progress; None: it depends on the usual step time."""
    wait_gpus_s: float | None = None
    """How long to wait until the GPUs that the tasks need are free; None: start without waiting."""
    claim_pause_s: float = 5.0
    """The pause before all nodes are asked again. It should differ between runs that wait for the same GPUs."""
    syncs: frozenset[str] = frozenset()
    """The nodes to which the program's folder is sent."""
    restores: frozenset[str] = frozenset()
    """The nodes to which the last checkpoint is sent."""
    checks: bool = False
    """Whether the nodes are checked before the start."""
    only_checks: bool = False
    """Whether there are only checks: nothing is started, and an unusable node does not stop the others' checks."""

    def __post_init__(self) -> None:
        # "All trainers have succeeded" is true of no trainers: such an attempt would succeed at once.
        if not self.trainers:
            raise ValueError("a cluster needs a task whose end decides")

    @cached_property
    def hosts(self) -> frozenset[str]:
        return frozenset(self.nodes)

    @cached_property
    def tasks(self) -> frozenset[TaskId]:
        return frozenset().union(*self.nodes.values())

    @cached_property
    def trainers(self) -> frozenset[TaskId]:
        """The tasks that decide; they run the program."""
        return frozenset(task for task in self.tasks if task.type in self.strategy.decides)

    @cached_property
    def auxiliary(self) -> frozenset[TaskId]:
        return frozenset(task for task in self.tasks if task.is_auxiliary)

    @cached_property
    def servers(self) -> frozenset[TaskId]:
        """The tasks that have to serve until all trainers have ended."""
        return frozenset(task for task in self.tasks if task.type in self.strategy.serves)
