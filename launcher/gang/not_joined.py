"""Which tasks have not joined the cluster's leader yet, from what TensorFlow writes to the leader's log.

A task with an open port may still not reach the leader, because something blocks its connection. TensorFlow reports
this at level INFO only; with TF_CPP_MIN_LOG_LEVEL above 0 nothing is known.
"""

from __future__ import annotations

import re

from launcher.tasks import TASK_TYPES, TaskId

_WAITING = re.compile(rb"Waiting for (\d+)/\d+ tasks to connect")
_TASK = re.compile(rb"^/job:(\w+)/replica:\d+/task:(\d+)$", re.MULTILINE)


def parse_not_joined(log: bytes) -> frozenset[TaskId] | None:
    """The tasks that the leader named last (of many, only some); None if it has reported nothing."""
    last = None
    for last in _WAITING.finditer(log):  # noqa: B007 - the last one counts
        pass
    if last is None:
        return None
    if int(last[1]) == 0:
        return frozenset()
    named = _TASK.findall(log, last.end())
    known = {name.encode(): name for name in TASK_TYPES}
    return frozenset(TaskId(known[job], int(index)) for job, index in named if job in known)
