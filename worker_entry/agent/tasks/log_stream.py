"""Sends new parts of the tasks' logs to the controller."""

from __future__ import annotations

from collections import deque

from worker_entry.agent.connection.connection import OUTPUT_LIMIT, Connection
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.messages import Log, Noted
from worker_entry.protocol.units import render_size


def stream_logs(log_queue: deque[StartedTask], attempt: int, connection: Connection) -> None:
    """Sends one piece of each task's log in turn, so that a chatty task does not delay the others.

    Returns when everything is sent or the connection has enough to write.
    """
    exhausted = 0
    while exhausted < len(log_queue) and connection.pending < OUTPUT_LIMIT:
        task = log_queue[0]
        log_queue.rotate(-1)
        offset, data, hole, marks = task.log.read()
        if hole:
            connection.send(Noted(f"the log of {task.name} has a hole of {render_size(hole)}, which is skipped"))
        if data or marks:
            connection.send_part(Log(attempt, task.name, offset, len(data), marks), data)
        exhausted = 0 if data else exhausted + 1
