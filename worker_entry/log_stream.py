"""Sends what tasks have written into their logs."""

from __future__ import annotations

from collections import deque

from worker_entry.connection import OUTPUT_LIMIT, Connection
from worker_entry.holes import render_bytes
from worker_entry.messages import Log, Noted
from worker_entry.started_task import StartedTask


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
