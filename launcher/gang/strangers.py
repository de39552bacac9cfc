"""Messages about who can reach the tasks' ports, and who has tried."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.events import Event, NodePrepared, TaskUnguarded
from launcher.tasks import TaskId
from launcher.wording import count_of
from worker_entry.protocol.strangers import Repelled


def render_stranger(repelled: Repelled) -> str:
    """`worker:1's port has refused 3 connections from 10.0.0.99, …`."""
    return (
        f"{repelled.task}'s port has refused {count_of(repelled.count, 'connection')} from {repelled.address}, which "
        "is not part of this cluster; `allow:` in the spec lets a network in"
    )


def render_news_of_guards(event: Event) -> list[str]:
    """Lines for ports that turn out to be unguarded."""
    match event:
        case NodePrepared(unguarded=unguarded):
            return render_unguarded(unguarded)
        case TaskUnguarded(task, why):
            return render_unguarded({task: why})
    return []


def render_unguarded(unguarded: Mapping[TaskId, str]) -> list[str]:
    """A line for each reason why strangers can reach ports."""
    tasks: dict[str, list[str]] = {}
    for task, why in unguarded.items():
        tasks.setdefault(why, []).append(str(task))
    return [f"anyone can reach the ports of {', '.join(names)}: {why}" for why, names in tasks.items()]
