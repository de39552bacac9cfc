"""The environment by which the processes of PyTorch, JAX, and Keras on either of them find each other.

PyTorch reads torchrun's variables. JAX reads only the coordinator's address; a hook in each process gives it the rest,
from the names that JAX's users know. Keras reads its own variables with every backend. The first task opens the port to
which all tasks connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.spec.strategies import Framework
from launcher.tasks import TaskId
from worker_entry.protocol import environment
from worker_entry.protocol.addresses import split_address


def make_framework_envs(
    framework: Framework, placements: Sequence[tuple[str, TaskId]], addresses: Mapping[TaskId, str]
) -> dict[TaskId, Mapping[str, str]]:
    """The variables of every task; empty for TensorFlow, which has TF_CONFIG.

    Args:
        framework: the framework of the program.
        placements: each task with its node, in the order of the ranks.
        addresses: `host:port` of each task, as the tasks see it.
    """
    if framework == "tensorflow":
        return {}
    on_node: dict[str, list[TaskId]] = {}
    for node, task in placements:
        on_node.setdefault(node, []).append(task)
    first = addresses[placements[0][1]]
    envs: dict[TaskId, Mapping[str, str]] = {}
    for rank, (node, task) in enumerate(placements):
        here = on_node[node]
        env = make_rank_env(framework, first, str(rank), len(placements))
        if framework == "torch":
            env |= {"LOCAL_RANK": str(here.index(task)), "LOCAL_WORLD_SIZE": str(len(here))}
        else:
            env[environment.ADDRESS] = split_address(addresses[task])[0]
        envs[task] = env
    return envs


def make_rank_env(framework: Framework, first: str, rank: str, size: int) -> dict[str, str]:
    """The variables of one process that do not depend on its node.

    Args:
        framework: `torch` or `jax`.
        first: `host:port` of rank 0.
        rank: the process's rank, or what Kubernetes replaces by it.
        size: the number of processes.
    """
    keras = {
        "KERAS_BACKEND": framework,
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": first,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(size),
        "KERAS_DISTRIBUTION_PROCESS_ID": rank,
    }
    if framework == "torch":
        host, port = split_address(first)
        if ":" in host:  # Keras on torch cannot read an IPv6 address; without this variable, it takes MASTER_ADDR
            del keras["KERAS_DISTRIBUTION_JOB_ADDRESSES"]
        return {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": str(size), **keras}
    return {
        environment.JAX_COORDINATOR: first,
        environment.JAX_PROCESSES: str(size),
        environment.JAX_PROCESS: rank,
        **keras,
    }
