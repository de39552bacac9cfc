"""Which tasks a forming cluster waits for, and what is known of each."""

from __future__ import annotations

from launcher.gang.state import AttemptState
from launcher.tasks import TaskId, find_leader, name_tasks
from worker_entry.protocol.values import NOT_IMPORTED

SHOWN_TASKS = 4


def render_waiting(state: AttemptState, now: float) -> str:
    """`waiting for worker:2 on gpu-b (port 20001 not open, is importing TensorFlow, 40 s); worker:0 is ready`.

    Args:
        state: an attempt whose cluster some tasks have not joined yet.
        now: Unix seconds by the controller's clock.
    """
    missing = state.missing
    shown = ", ".join(_render_task(state, task, now) for task in missing[:SHOWN_TASKS])
    more = f" and {len(missing) - SHOWN_TASKS} more" if len(missing) > SHOWN_TASKS else ""
    ready = sorted((state.policy.forming & state.listening.keys()) - set(missing))
    rest = f"; {name_tasks(ready, SHOWN_TASKS)} {'is' if len(ready) == 1 else 'are'} ready" if ready else ""
    return f"waiting for {shown}{more}{rest}"


def _render_task(state: AttemptState, task: TaskId, now: float) -> str:
    node = next(name for name, tasks in state.policy.nodes.items() if task in tasks)
    not_joined = task in state.listening
    known = (
        [f"port {state.ports[task]} {'open' if not_joined else 'not open'}"]
        if task in state.ports and task in state.policy.forming
        else []
    )
    if not_joined:
        known.append(f"{find_leader(state.policy.tasks)} has not heard from it")
    if task in state.halted:
        known.append("stopped by a signal")
    elif task in state.status and not not_joined:
        status = state.status[task]
        if status.phase != NOT_IMPORTED:  # the program may never import it
            known.append(f"{status.phase}, {max(now - status.since, 0.0):.0f} s")
        if status.strategy:
            known.append(f"has built {status.strategy}")
    return f"{task} on {node} ({', '.join(known)})" if known else f"{task} on {node}"
