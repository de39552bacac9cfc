"""Sends what tasks have written into their logs."""

from __future__ import annotations

from collections import deque

from worker_entry.agent.connection import OUTPUT_LIMIT, Connection
from worker_entry.agent.task_process import StartedTask
from worker_entry.protocol.messages import Log, Noted
from worker_entry.system.file_holes import render_bytes


def stream_logs(turns: deque[StartedTask], attempt: int, connection: Connection) -> None:
    """Sends a piece of every task in turn, so that none waits for a chatty one, until all is sent or enough."""
    silent = 0
    while silent < len(turns) and connection.pending < OUTPUT_LIMIT:
        task = turns[0]
        turns.rotate(-1)
        offset, data, hole = task.read_log()
        if hole:
            connection.send(Noted(f"the log of {task.name} has a hole of {render_bytes(hole)}, which is left out"))
        if data:
            connection.send(Log(attempt, task.name, offset, len(data)), data)
        silent = 0 if data else silent + 1
