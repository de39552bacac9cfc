"""Messages about who can reach the tasks' ports, and who has tried."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.events import Event, TaskListening, TaskUnguarded
from launcher.gang.state import AttemptState
from launcher.tasks import TaskId, name_tasks, parse_task_id
from launcher.wording import count_of
from worker_entry.protocol.messages import ConnectionsRejected


def render_rejected(rejected: ConnectionsRejected) -> str:
    """`worker:1's port has refused 3 connections from 10.0.0.99, …`."""
    return (
        f"{rejected.task}'s port has refused {count_of(rejected.count, 'connection')} from {rejected.address}, which "
        "is not part of this cluster; `allow:` in the spec lets a network in"
    )


def render_news_of_guards(state: AttemptState, event: Event) -> list[str]:
    """Lines for open ports that unknown peers can reach; `state`: after the event."""
    match event:
        case TaskListening(task) if task in state.unguarded:
            return render_unguarded({task: state.unguarded[task]})
        case TaskUnguarded(task, why) if task in state.listening:
            return render_unguarded({task: why})
    return []


def render_unguarded(unguarded: Mapping[TaskId, str]) -> list[str]:
    """A line for each reason why unknown peers can reach ports."""
    tasks: dict[str, list[str]] = {}
    for task, why in unguarded.items():
        tasks.setdefault(why, []).append(str(task))
    return [
        f"anyone can reach the port{'s' if len(names) > 1 else ''} of {name_tasks(map(parse_task_id, names))}: {why}"
        for why, names in tasks.items()
    ]
