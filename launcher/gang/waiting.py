"""Whom a cluster that forms is waiting for, by what is known of each task. Pure."""

from __future__ import annotations

from launcher.gang.state import Gang
from launcher.tasks import TaskId, find_leader, name_tasks

SHOWN_TASKS = 4


def render_waiting(gang: Gang, now: float) -> str:
    """`waiting for worker:2 on gpu-b (port 20001 not open, is importing TensorFlow, 40 s); worker:0 is ready`.

    Args:
        gang: a cluster that not all tasks have joined.
        now: Unix seconds by the controller's clock.
    """
    missing = gang.missing
    shown = ", ".join(_render_task(gang, task, now) for task in missing[:SHOWN_TASKS])
    more = f" and {len(missing) - SHOWN_TASKS} more" if len(missing) > SHOWN_TASKS else ""
    ready = sorted((gang.rules.forming & gang.listening.keys()) - set(missing))
    rest = f"; {name_tasks(ready, SHOWN_TASKS)} {'is' if len(ready) == 1 else 'are'} ready" if ready else ""
    return f"waiting for {shown}{more}{rest}"


def _render_task(gang: Gang, task: TaskId, now: float) -> str:
    node = next(name for name, tasks in gang.rules.nodes.items() if task in tasks)
    unheard = task in gang.listening
    known = [f"port {gang.ports[task]} {'open' if unheard else 'not open'}"] if task in gang.ports else []
    if unheard:
        known.append(f"{find_leader(gang.rules.tasks)} has not heard of it")
    if task in gang.halted:
        known.append("stopped by a signal")
    elif task in gang.told and not unheard:
        told = gang.told[task]
        known.append(f"{told.phase}, {max(now - told.since, 0.0):.0f} s")
        if told.strategy:
            known.append(f"has built {told.strategy}")
    return f"{task} on {node} ({', '.join(known)})" if known else f"{task} on {node}"
