"""The rules of each tf.distribute strategy: its task types, which of them decide the outcome, and what each runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from launcher.tasks import TASK_TYPES, TaskType
from worker_entry.protocol.frozen import dataclass, field, replace
from worker_entry.protocol.strategy_names import CLASSES, StrategyName

STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)

Framework = Literal["tensorflow", "torch", "jax"]


@dataclass(frozen=True)
class StrategyRules:
    """A strategy's rules; the fields up to `needs` hold task types."""

    types: tuple[TaskType, ...]
    """Allowed task types."""
    decides: tuple[TaskType, ...]
    """Task types that decide: the run succeeds when all of their tasks succeed."""
    computes: tuple[TaskType, ...]
    """Task types that share a node's GPUs, and count as its workers."""
    serves: tuple[TaskType, ...] = ()
    """Task types that run TensorFlow's server instead of the program, and never end by themselves."""
    restarted_individually: tuple[TaskType, ...] = ()
    """Task types whose tasks restart individually when they end, while the others continue."""
    needs: tuple[TaskType, ...] = ()
    """Required task types."""
    alone: bool = False
    """Whether the strategy runs one process with all devices: there is no cluster, and no TF_CONFIG."""
    collective: bool = False
    """Whether the tasks meet at a leader, and wait for each other in every step."""
    reports_joining: bool = False
    """Whether each process reports when it joins the cluster; only the leader opens a port."""
    shares_gpus: bool = True
    """Whether each process sees only its share of a node's GPUs; otherwise it sees all and selects its own."""
    patches_keras: bool = False
    """Whether distlaunch patches Keras 3, which has faults where a process has a strategy, is one of several, or leaves
    its steps to others."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every task."""


_ALONE = StrategyRules(types=("worker",), decides=("worker",), computes=("worker",), alone=True)
_PATCHED = replace(_ALONE, patches_keras=True)

RULES: Mapping[StrategyName, StrategyRules] = {
    "one_device": _PATCHED,
    "mirrored": _PATCHED,
    "central_storage": _PATCHED,
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
        # A call to an unreachable worker fails at once, so that its work goes to another worker instead of waiting.
        env={"GRPC_FAIL_FAST": "use_caller"},
    ),
}


SEPARATE_CLASSES = tuple(CLASSES[name] for name, rules in RULES.items() if rules.alone)
"""TensorFlow's strategies that run one process with all of its devices."""

TORCH = StrategyRules(types=("worker",), decides=("worker",), computes=("worker",), shares_gpus=False)
"""The rules of PyTorch: all processes are alike, and the run succeeds only if all succeed."""
JAX = replace(TORCH, collective=True, shares_gpus=True, patches_keras=True, reports_joining=True)
"""The rules of JAX: as PyTorch's, but each process sees only its own GPUs."""
JOIN_CALLS = ("jax.distributed.initialize()", "keras.distribution.initialize()")
"""The calls by which a process of JAX joins its cluster."""
FRAMEWORKS: Mapping[Framework, tuple[str, StrategyRules]] = {"torch": ("PyTorch", TORCH), "jax": ("JAX", JAX)}
"""The name and the rules of each framework that has no strategies."""


def find_role_problem(
    name: StrategyName, counts: Mapping[TaskType, int], framework: Framework = "tensorflow"
) -> tuple[TaskType | None, str] | None:
    """Finds what is wrong with these numbers of tasks: the task type at fault, if there is a single one, and why."""
    if framework in FRAMEWORKS:
        wrong = next((task_type for task_type, count in counts.items() if count and task_type != "worker"), None)
        message = f"{FRAMEWORKS[framework][0]} has only workers; write `tasks: {{worker: 1}}`"
        return None if wrong is None else (wrong, message)
    rules = RULES[name]
    total = sum(counts.values())
    if rules.alone and total > 1:
        return None, (
            f"{name} runs one process on one node, but this spec has {total} tasks; "
            "keep `tasks: {worker: 1}` on one node, or use multi_worker_mirrored"
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
        return f"strategy {name} has no parameter servers; remove `ps`, or use parameter_server"
    if task_type == "chief":
        return f"{name} runs one process and needs no chief; write `tasks: {{worker: 1}}`"
    return f"{name} runs one process, which evaluates by itself; remove `evaluator`"
