"""The environment that PyTorch's `init_process_group` reads: the address of rank 0, and each task's ranks.

The names are torchrun's. Rank 0 opens the port to which all tasks connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.tasks import TaskId


def make_torch_envs(
    placements: Sequence[tuple[str, TaskId]], master: tuple[str, int]
) -> dict[TaskId, Mapping[str, str]]:
    """The variables of every task.

    Args:
        placements: each task with its node, in the order of the ranks.
        master: the address and port of rank 0.
    """
    address, port = master
    on_node: dict[str, list[TaskId]] = {}
    for node, task in placements:
        on_node.setdefault(node, []).append(task)
    return {
        task: {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placements)),
            "LOCAL_RANK": str(on_node[node].index(task)),
            "LOCAL_WORLD_SIZE": str(len(on_node[node])),
        }
        for rank, (node, task) in enumerate(placements)
    }
