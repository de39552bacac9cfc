"""The order for the Python processes that a task starts, passed in the environment; `children` reads it.

A task may be a command, or may train in a child process. So PYTHONPATH begins with our folder `children`, whose
`sitecustomize` runs in every Python below the task, unless Python's options prevent that (`-S`, `-E`, `-I`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from worker_entry.protocol import environment
from worker_entry.protocol.values import Program, TaskOrder

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "children")
PYTHONPATH = "PYTHONPATH"
OF_THE_TASK = ("crash_file", "status_file")
"""Fields that apply only to the task's own process."""
OF_ALL = ("child_file", "child_crash_file", "stacks_file", "patch_keras", "coordination_timeout_s", "progress")
"""Fields that apply to all Python processes of the task."""


def make_child_env(order: TaskOrder, env: Mapping[str, str], *, starter: int = 0) -> dict[str, str]:
    """Returns the environment that passes the order to all Python processes of the task.

    Args:
        order: the task's order.
        env: the environment to extend.
        starter: for a command, the pid of the process that starts the command: that process's child is the task's own
            process. 0 if our runner is the task's own process, so that any other Python is a child of the task.
    """
    child_env = dict(env)
    child_env.pop(environment.CHILDREN, None)  # set if this task is started within another task
    if not (order.patch_keras or order.progress or order.coordination_timeout_s):
        return child_env
    names = (*OF_ALL, *(OF_THE_TASK if starter else ()))
    child_env[environment.CHILDREN] = f"{starter} {json.dumps({name: getattr(order, name) for name in names})}"
    rest = child_env.get(PYTHONPATH) or None
    child_env[PYTHONPATH] = os.pathsep.join(
        [FOLDER, *(() if rest is None else (entry for entry in rest.split(os.pathsep) if entry != FOLDER))]
    )
    return child_env


def parse_order(text: str) -> TaskOrder:
    """Parses the order for a child process; the order has no program."""
    return TaskOrder(Program("command", ""), **json.loads(text))
