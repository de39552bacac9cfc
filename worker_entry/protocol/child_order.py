"""What the Pythons are told that a task starts, through its environment: `children` has those read it.

A task may be a command, or start its training as a process of its own. PYTHONPATH begins with a folder of ours, whose
`sitecustomize` every Python below the task runs, unless it was asked not to (`-S`, `-E`, `-I`).
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
"""What the task's own process writes, and no other."""
OF_ALL = ("child_file", "child_crash_file", "stacks_file", "patch_keras", "coordination_timeout_s", "progress")


def make_child_env(order: TaskOrder, env: Mapping[str, str], *, starter: int = 0) -> dict[str, str]:
    """The environment that has all Pythons do what the order says.

    Args:
        order: the task's.
        env: without that.
        starter: of a command, the process that starts it, whose child is the task itself; 0 where the task is run by
            us, so that those which it starts are something else.
    """
    told = dict(env)
    told.pop(environment.CHILDREN, None)  # of a task in which this one is started
    if not (order.patch_keras or order.progress or order.coordination_timeout_s):
        return told
    names = (*OF_ALL, *(OF_THE_TASK if starter else ()))
    told[environment.CHILDREN] = f"{starter} {json.dumps({name: getattr(order, name) for name in names})}"
    rest = told.get(PYTHONPATH) or None
    told[PYTHONPATH] = os.pathsep.join(
        [FOLDER, *(() if rest is None else (entry for entry in rest.split(os.pathsep) if entry != FOLDER))]
    )
    return told


def parse_order(text: str) -> TaskOrder:
    """What a Python is told, as an order that has no program."""
    return TaskOrder(Program("command", ""), **json.loads(text))
