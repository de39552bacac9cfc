"""Defects that distlaunch has had, or would have without a rule: Storm has to find each one when it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from launcher.controller import resume, supervisor
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import Pauses
from launcher.gang import decide as rules
from launcher.gang import facts
from launcher.gang.events import Event, TaskExited
from launcher.gang.restarts import AttemptOutcome
from launcher.gang.state import AttemptState, Phase
from launcher.rundir import history
from launcher.rundir.record import RecordedPlan
from launcher.transports.incoming import Inbox, Placement, Received
from tests.sim.storm import controllers
from worker_entry.protocol.frozen import replace

Patches = Callable[[], Iterator[Any]]


def _every_address(plan: RecordedPlan) -> dict[str, str]:
    return {task.node: task.address for task in plan.tasks}


def _begin_in_a_hurry(self: NodeLinks, attempt: int, nodes: Mapping[str, Any]) -> None:
    self._placement = Placement.of(attempt, nodes)
    self._mirror.begin(attempt)


def _release_and_settle(self: Inbox, arrived: Received, release: Any = Inbox.release) -> None:
    release(self, arrived)
    self.settle(arrived)


def _accept_each_exit(state: AttemptState, event: Event, is_relevant: Any = facts.is_relevant) -> bool:
    if isinstance(event, TaskExited):
        return event.task in state.started and event.task not in state.exits
    return bool(is_relevant(state, event))


def _take_over_at_once(state: AttemptState) -> AttemptState:
    return replace(state, phase=Phase.RUNNING)


def _never_count(ending: AttemptOutcome, *_: Any, **__: Any) -> AttemptOutcome:
    return replace(ending, is_free=True)


def _leave_all(files: Any, past: Any, _run_id: str, planner: Any, *_: Any, **__: Any) -> Any:
    return resume.find_running_attempt(files, past, planner)


def _start_limits_only(state: AttemptState, now: float, after: Any = rules._after_takeover) -> Any:
    return after(state, now)[0], ()


DEFECTS: Mapping[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "address": (
        "a resume never takes over a run with TensorBoard, whose address it mistakes for that of its node",
        lambda: patch.object(resume, "_find_addresses", _every_address),
    ),
    "hurry": (
        "once a run has hurried, each later attempt loses a node that is silent for five seconds",
        lambda: patch.object(NodeLinks, "begin", _begin_in_a_hurry),
    ),
    "unclosed": (
        "an agent that has not answered stays connected when the next attempt connects to its node",
        lambda: patch.object(NodeLinks, "end_unanswered", lambda _: None),
    ),
    "ready": (
        "after a takeover of a later attempt, a stop does not wait for nodes that were connected before",
        lambda: patch.object(history, "AttemptState", lambda policy, phase, ready: AttemptState(policy, phase=phase)),
    ),
    "blind": (
        "a cluster that trains counts as hung while the connections to its nodes are broken",
        lambda: patch.object(AttemptState, "is_blind", False),
    ),
    "fence": (
        "a restart does not wait until the tasks of a lost node have certainly ended",
        lambda: patch.object(Pauses, "fence", lambda *_: None),
    ),
    "confirm": (
        "a message counts as handled as soon as it is read, and is lost when the controller dies before it acts",
        lambda: patch.object(Inbox, "release", _release_and_settle),
    ),
    "late": (
        "messages about the tasks of an attempt that has ended reach the next one",
        lambda: patch.object(Received, "is_late", False),
    ),
    "starts": (
        "the repeated end of a task's earlier start counts as the end of its later one",
        lambda: patch.object(rules, "is_relevant", _accept_each_exit),
    ),
    "detached": (
        "after a takeover, time limits run before the nodes are attached",
        lambda: patch.object(history, "take_over", _take_over_at_once),
    ),
    "orders": (
        "after a takeover, a restart order that has not arrived is not repeated",
        lambda: patch.object(rules, "_after_takeover", _start_limits_only),
    ),
    "budget": (
        "no restart counts",
        lambda: patch.object(supervisor, "price", _never_count),
    ),
    "leftovers": (
        "a resume starts the cluster again beside the tasks that it could not take over",
        lambda: patch.object(controllers, "prepare", _leave_all),
    ),
}
"""Each with what it does, and how it is put back."""


def put_back(name: str) -> contextlib.AbstractContextManager[Any]:
    """Puts a defect back; none if the name is empty."""
    return DEFECTS[name][1]() if name else contextlib.nullcontext()
