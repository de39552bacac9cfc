"""Shares the cores and GPUs of a node among its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import TooFewGpusError
from launcher.plan.import_env import share_cores
from launcher.spec.nodes import NodeSpec
from launcher.spec.strategies import StrategyRules
from launcher.tasks import TaskId
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Ready

NO_GPU = "-1"
"""CUDA_VISIBLE_DEVICES of a task that must see no GPU; an empty value also works, but is less clear to a reader."""
MEMORY_GROWS = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""The variables by which TensorFlow and JAX take a GPU's memory as they need it, instead of most of it at once."""


@dataclass(frozen=True)
class NodeFacts:
    """A node's resources: the number of cores that tasks may use, and `gpus` as CUDA_VISIBLE_DEVICES names them.

    `python`: the path of its interpreter, if known. `claimed`: the GPUs that it keeps for the run, once the run has
    waited for them; the tasks get no others.
    """

    cores: int
    gpus: tuple[str, ...] = ()
    python: str = ""
    claimed: tuple[str, ...] | None = None

    @classmethod
    def of(cls, ready: Ready, claimed: tuple[str, ...] | None = None) -> NodeFacts:
        """The facts that a node's agent has reported."""
        return cls(ready.cores, tuple(ready.gpus), ready.executable, claimed)


def find_needed_gpus(
    node: NodeSpec, tasks: Sequence[TaskId], rules: StrategyRules, facts: NodeFacts
) -> tuple[list[str], int]:
    """The GPUs that the tasks of a node may get, and how many of them they need."""
    gpus = facts.gpus if node.gpus is None else node.gpus
    trainers = sum(task.type in rules.computes for task in tasks)
    takes_rest = not rules.shares_gpus or any(task.type == "evaluator" for task in tasks)
    if node.gpus_per_worker is None or takes_rest:
        return [*gpus], len(gpus) if trainers or takes_rest else 0
    return [*gpus], min(node.gpus_per_worker * trainers, len(gpus))


def share_resources(
    node: NodeSpec,
    tasks: Sequence[TaskId],
    rules: StrategyRules,
    facts: NodeFacts | None,
    warnings: list[str],
) -> dict[TaskId, dict[str, str]]:
    """The variables that give each task its share of the cores, and each computing task its share of the GPUs.

    Args:
        node: the node.
        tasks: its tasks.
        rules: the strategy's.
        facts: the node's resources; None if they are not known yet.
        warnings: gets messages for the user.

    Raises:
        TooFewGpusError: the node has fewer GPUs than the spec asks for.
    """
    shares: dict[TaskId, dict[str, str]] = {task: {} for task in tasks}
    if facts is not None:
        for share in shares.values():
            share.update(share_cores(facts.cores, len(tasks)))
    trainers = [task for task in tasks if task.type in rules.computes]
    gpus = _find_gpus(node, facts)
    if facts is not None:
        _check_gpus(node, len(trainers), gpus, facts, warnings)
    if node.gpus is None and not (facts is not None and facts.gpus):
        return shares
    if facts is not None and facts.claimed:
        for share in shares.values():
            share["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers are NVML's; CUDA may have others
    if not rules.shares_gpus:
        for share in shares.values():
            share["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) or NO_GPU
        return shares
    rest = _share_gpus(node, trainers, gpus, shares, warnings)
    for task in tasks:
        if task not in trainers:  # an evaluator gets the GPUs that the trainers leave over
            shares[task]["CUDA_VISIBLE_DEVICES"] = ",".join(rest if task.type == "evaluator" else ()) or NO_GPU
    return shares


def _find_gpus(node: NodeSpec, facts: NodeFacts | None) -> tuple[str, ...]:
    """The GPUs that the run may use: those that it has claimed, that the spec names, or that the node has."""
    if facts is not None and facts.claimed is not None:
        return facts.claimed
    if node.gpus is not None:
        return tuple(node.gpus)
    return facts.gpus if facts is not None else ()


def _check_gpus(node: NodeSpec, trainers: int, gpus: Sequence[str], facts: NodeFacts, warnings: list[str]) -> None:
    wanted = (node.gpus_per_worker or 0) * trainers
    if wanted > len(gpus):
        raise TooFewGpusError(
            f"{node.host} has {count_of(len(gpus), 'GPU')}, but {count_of(trainers, 'worker')} with "
            f"{node.gpus_per_worker} each would need {wanted}",
            hint="lower gpus_per_worker (--gpus-per-worker), or the number of workers",
        )
    absent = [gpu for gpu in gpus if gpu.isdigit() and gpu not in facts.gpus]
    if absent:
        warnings.append(f"{node.host} has no GPU {', '.join(absent)}: the program would train on the CPU instead")


def _share_gpus(
    node: NodeSpec,
    trainers: Sequence[TaskId],
    gpus: tuple[str, ...],
    shares: dict[TaskId, dict[str, str]],
    warnings: list[str],
) -> tuple[str, ...]:
    """Gives each trainer its GPUs; returns the GPUs that are left."""
    if len(trainers) > len(gpus) > 0:
        warnings.append(
            f"{len(trainers)} workers share {count_of(len(gpus), 'GPU')} on {node.host}: memory grows as "
            "needed; with NCCL two workers must not share a GPU"
        )
        for index, task in enumerate(trainers):
            shares[task]["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
            shares[task].update(MEMORY_GROWS)
        return ()
    size = node.gpus_per_worker or len(gpus) // max(1, len(trainers))
    for index, task in enumerate(trainers):
        shares[task]["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * size : (index + 1) * size]) or NO_GPU
    return gpus[size * len(trainers) :]
