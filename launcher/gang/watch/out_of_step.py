"""Workers that are out of step: one evaluates alone, say, and its collectives meet others of its peers.

TensorFlow notices when two collectives that meet differ, and reports it to one worker or to some. The place of each
worker is in its crash record, or in its stack, which it sends before it is stopped.
"""

from __future__ import annotations

from launcher.gang.events import TaskExited
from launcher.gang.state import AttemptState
from launcher.gang.watch.stacks import find_call
from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.collateral import OUT_OF_STEP
from worker_entry.protocol.values import Place

PHRASES = ("Collective instance ", "Shape mismatch in the collective instance", "is joining a group ")
"""Parts of TensorFlow's sentence."""


def is_out_of_step(event: TaskExited) -> bool:
    """Whether the task failed because its peers did something else."""
    return event.crash is not None and OUT_OF_STEP.search(event.crash.message) is not None


def render_split(state: AttemptState) -> str:
    """Each task's place: `worker:0 is in evaluate at train.py:31, worker:1 in fit at train.py:29`; empty if unknown."""
    places, unknown = _find_places(state)
    groups = [(tasks, _render_place(place)) for place, tasks in places.items()]
    if not groups:
        return ""
    if len(groups) == 1 and not unknown:
        return f"all are {groups[0][1]}"
    if unknown:
        groups.append((unknown, "somewhere unknown"))
    (tasks, where), *others = groups
    first = f"{name_tasks(tasks)} {'is' if len(tasks) == 1 else 'are'} {where}"
    return ", ".join([first, *(f"{name_tasks(tasks)} {where}" for tasks, where in others)])


def find_outsider(state: AttemptState) -> TaskId | None:
    """The one task that was elsewhere, if at least two others were together."""
    places, unknown = _find_places(state)
    alone = [tasks[0] for tasks in places.values() if len(tasks) == 1]
    return alone[0] if len(places) == 2 and len(alone) == 1 and not unknown else None


def _find_places(state: AttemptState) -> tuple[dict[Place, list[TaskId]], list[TaskId]]:
    """The training tasks by their places, and those whose place is not known."""
    places: dict[Place, list[TaskId]] = {}
    unknown = []
    for task in sorted(state.policy.trainers):
        place = _find_place(state, task)
        if place is None:
            unknown.append(task)
        else:
            places.setdefault(place, []).append(task)
    return places, unknown


def _find_place(state: AttemptState, task: TaskId) -> Place | None:
    event = state.exits.get(task)
    if event is not None and event.crash is not None and event.crash.place is not None:
        return event.crash.place
    return find_call(state.stacks[task]) if task in state.stacks else None


def _render_place(place: Place) -> str:
    return f"{f'in {place.call} ' if place.call else ''}at {place.file}:{place.line}"
