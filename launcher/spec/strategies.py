"""What follows from the tf.distribute strategy of a spec: which tasks there are, whose end counts, what they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from launcher.tasks import TASK_TYPES, TaskType

StrategyName = Literal[
    "one_device",
    "mirrored",
    "central_storage",
    "multi_worker_mirrored",
    "parameter_server",
    "tpu",
]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)

Framework = Literal["tensorflow", "torch"]

Communication = Literal["auto", "ring", "nccl"]
"""How workers add up their gradients; of multi_worker_mirrored."""
CrossDevice = Literal["nccl", "hierarchical_copy", "reduction_to_one_device"]
"""How the devices of one process do; of mirrored."""


@dataclass(frozen=True)
class StrategyRules:
    """A strategy's rules; each field but the last ones names types of tasks."""

    types: tuple[TaskType, ...]
    """Those that it can have."""
    decides: tuple[TaskType, ...]
    """Those whose success is that of the run."""
    computes: tuple[TaskType, ...]
    """Those that share out a node's GPUs, and count as its workers."""
    serves: tuple[TaskType, ...] = ()
    """Those that run TensorFlow's server in place of the program, and never end by themselves."""
    restarted_individually: tuple[TaskType, ...] = ()
    """Those of which one that ends is started again alone, while the others go on."""
    needs: tuple[TaskType, ...] = ()
    """Those without which it cannot be."""
    alone: bool = False
    """Whether it is one process with all of its devices: there is no cluster, and no TF_CONFIG."""
    collective: bool = False
    """Whether the tasks meet at a leader, and wait for each other in every step."""
    shares_gpus: bool = True
    """Whether each process sees its part of a node's GPUs only; else all of them, of which it takes its own."""
    patches_keras: bool = False
    """Whether Keras 3 has faults under it that are patched: where a process has several replicas, is one of them, or
    has its steps done by others."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every task."""


_ALONE = StrategyRules(types=("worker",), decides=("worker",), computes=("worker",), alone=True)
_SEVERAL_DEVICES = replace(_ALONE, patches_keras=True)

RULES: Mapping[StrategyName, StrategyRules] = {
    "one_device": _ALONE,
    "mirrored": _SEVERAL_DEVICES,
    "central_storage": _SEVERAL_DEVICES,
    "tpu": _ALONE,
    "multi_worker_mirrored": StrategyRules(
        types=("chief", "worker", "evaluator"),
        decides=("chief", "worker"),
        computes=("chief", "worker"),
        collective=True,
        patches_keras=True,
    ),
    "parameter_server": StrategyRules(
        types=TASK_TYPES,
        decides=("chief",),
        computes=("worker",),
        serves=("worker", "ps"),
        restarted_individually=("worker",),
        needs=("chief", "worker", "ps"),
        patches_keras=True,
        # A call to a worker that is away fails at once, and its work goes to another, instead of waiting for it.
        env={"GRPC_FAIL_FAST": "use_caller"},
    ),
}


TORCH = StrategyRules(types=("worker",), decides=("worker",), computes=("worker",), shares_gpus=False)
"""PyTorch's processes: alike, and all or nothing."""


def find_role_problem(
    name: StrategyName, counts: Mapping[TaskType, int], framework: Framework = "tensorflow"
) -> tuple[TaskType | None, str] | None:
    """What is wrong with a cluster of so many tasks of each type: the type at fault, if it is one, and why."""
    if framework == "torch":
        wrong = next((task_type for task_type, count in counts.items() if count and task_type != "worker"), None)
        return None if wrong is None else (wrong, "all processes of PyTorch are workers; write `tasks: {worker: 1}`")
    rules = RULES[name]
    total = sum(counts.values())
    if rules.alone and total > 1:
        return None, (
            f"{name} is one process on one node, this spec has {total} tasks; keep `tasks: {{worker: 1}}` on one node, "
            "or use multi_worker_mirrored"
        )
    for task_type, count in counts.items():
        if count and task_type not in rules.types:
            return task_type, _unwanted(name, task_type)
    for task_type in rules.needs:
        if not counts.get(task_type):
            return None, f"parameter_server needs a {task_type}; add `{task_type}: 1` to the `tasks:` of a node"
    return None


def _unwanted(name: StrategyName, task_type: TaskType) -> str:
    if task_type == "ps":
        return f"strategy {name} has no parameter servers; leave `ps` out, or use parameter_server"
    if task_type == "chief":
        return f"{name} is one process, which needs no chief; write `tasks: {{worker: 1}}`"
    return f"{name} is one process, whose program evaluates by itself; leave `evaluator` out"
