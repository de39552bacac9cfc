"""What PyTorch's `init_process_group` reads from the environment: where to meet, and who is who. Pure.

The names are those of torchrun. Rank 0 opens the port at which all meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.tasks import TaskId


def make_torch_envs(
    placements: Sequence[tuple[str, TaskId]], meeting: tuple[str, int]
) -> dict[TaskId, Mapping[str, str]]:
    """The variables of every task.

    Args:
        placements: the node of each task, in the order of their ranks.
        meeting: the address and port of the first of them.
    """
    address, port = meeting
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
