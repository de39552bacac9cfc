"""Finds the tasks that have not joined the cluster's leader yet, in TensorFlow's messages in the leader's log.

A task with an open port may still fail to reach the leader, because something blocks its connection. TensorFlow reports
this only at level INFO; with TF_CPP_MIN_LOG_LEVEL above 0, nothing is known.
"""

from __future__ import annotations

import re

from launcher.tasks import TASK_TYPES, TaskId

_WAITING = re.compile(rb"Waiting for (\d+)/\d+ tasks to connect")
_TASK = re.compile(rb"^/job:(\w+)/replica:\d+/task:(\d+)$", re.MULTILINE)


def parse_not_joined(log: bytes) -> frozenset[TaskId] | None:
    """The tasks that the leader named last (only some, if there are many); None if the leader has reported nothing."""
    last = None
    for last in _WAITING.finditer(log):  # noqa: B007 - the last match counts
        pass
    if last is None:
        return None
    if int(last[1]) == 0:
        return frozenset()
    named = _TASK.findall(log, last.end())
    known = {name.encode(): name for name in TASK_TYPES}
    return frozenset(TaskId(known[job], int(index)) for job, index in named if job in known)
