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
from launcher.gang.watch import stalls
from launcher.rundir import history
from launcher.rundir.directory import RunDir
from launcher.rundir.record import RecordedPlan
from launcher.transports.frame_sender import FrameSender
from launcher.transports.incoming import Placement
from launcher.transports.resumable_link import ResumableLink
from launcher.verdict import causes
from tests.sim.storm import controllers
from worker_entry.agent.connection.connection import Connection
from worker_entry.agent.tasks.attempt import AttemptRunner
from worker_entry.agent.tasks.table import RunningTasks
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.orders import Beat


def _every_address(plan: RecordedPlan) -> dict[str, str]:
    return {task.node: task.address for task in plan.tasks}


def _begin_in_a_hurry(self: NodeLinks, attempt: int, nodes: Mapping[str, Any]) -> None:
    self._placement = Placement.of(attempt, nodes)
    self._mirror.begin(attempt)


def _accept_each_end(state: AttemptState, event: Event, is_relevant: Any = facts.is_relevant) -> bool:
    return event.task in state.started if isinstance(event, TaskExited) else bool(is_relevant(state, event))


def _claim_all(self: RunDir, attempt: int, tasks: Any) -> dict[str, int]:
    del self, attempt
    return {str(task): 60 for task in tasks}


def _only_forget(self: NodeLinks, nodes: Any) -> None:
    for node in nodes:
        self._links.pop(node, None)
        self.ready.pop(node, None)
        self._close_inbox(node)


def _take_over_at_once(state: AttemptState) -> AttemptState:
    return replace(state, phase=Phase.RUNNING)


def _only_when_due(state: AttemptState, now: float) -> bool:
    return state.raised_due is not None and now >= state.raised_due


def _finish_as_stopped(state: AttemptState) -> AttemptState:
    return replace(state, phase=Phase.FINISHED, deadline=None)


def _has_ended(state: AttemptState) -> bool:
    rest = state.policy.tasks - state.policy.servers - state.policy.auxiliary - state.unreachable
    return state.phase is Phase.RUNNING and rest <= state.exits.keys() and not state.failures


def _is_blind_once_up(state: AttemptState) -> bool:
    return state.phase is Phase.RUNNING and any(map(state.needs, state.unheard | state.detached))


@contextlib.contextmanager
def _never_raised() -> Iterator[None]:
    with (
        patch.object(rules, "_is_raised_final", _only_when_due),
        patch.object(AttemptState, "is_over", property(_has_ended)),
    ):
        yield


def _never_count(ending: AttemptOutcome, *_: Any, **__: Any) -> AttemptOutcome:
    return replace(ending, is_free=True)


def _leave_all(files: Any, past: Any, _run_id: str, planner: Any, *_: Any, **__: Any) -> Any:
    return resume.find_running_attempt(files, past, planner)


def _attach_without_rest(self: FrameSender, stream: Any, *, received: int | None = None) -> None:
    with self._changed:
        if received is not None:
            self._outbox.confirm(received)
            self._written = self._outbox.last
        self._stream, self._beat_due, self._renews = stream, self._timing.monotonic() + self._beat_s, True


def _replace_with_all(self: Connection, reattachment: Any, received: int) -> None:
    _replace(self, reattachment, received)
    for frame in self.outbox.after(self.outbox.confirmed)[: received - self.outbox.confirmed]:
        self._put(frame)


_replace = Connection.replace


def _show_stacks_always(self: AttemptRunner) -> None:
    self._stacks.begin(self._tasks.by_name, self._tree.living())


def _keep_no_stamp(self: FrameSender, beat: Beat) -> None:
    _note_beat(self, replace(beat, stamp=None))


_note_beat = FrameSender.note_beat


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
    "forming": (
        "a cluster whose nodes are not connected is stopped, because it was not seen to form in time",
        lambda: patch.object(AttemptState, "is_blind", property(_is_blind_once_up)),
    ),
    "raised": (
        "a run succeeds although its program has raised, because the node of the process is then lost",
        _never_raised,
    ),
    "crossed": (
        "a training that has finished fails, because its end crosses the order to stop it",
        lambda: patch.object(rules, "_finish", _finish_as_stopped),
    ),
    "hidden": (
        "a program that raises, and whose process then exits with status 0, is a bug of distlaunch",
        lambda: patch.object(causes, "_find_hidden", lambda _: []),
    ),
    "fence": (
        "a restart does not wait until the tasks of a lost node have certainly ended",
        lambda: patch.object(Pauses, "fence", lambda *_: None),
    ),
    "hasty": (
        "a cluster in which all tasks wait is stopped soon, although something else than a task may wake one",
        lambda: patch.object(stalls, "is_deadlocked", lambda state: not stalls.find_busy(state)),
    ),
    "detached": (
        "after a takeover, time limits run before the nodes are attached",
        lambda: patch.object(history, "take_over", _take_over_at_once),
    ),
    "ends": (
        "a task has a second end when it is reported again after a takeover",
        lambda: patch.object(rules, "is_relevant", _accept_each_end),
    ),
    "offsets": (
        "after a takeover, logs are sent on from where the agent has stopped, not from what the run's folder has",
        lambda: patch.object(RunDir, "log_sizes", _claim_all),
    ),
    "links": (
        "the connections to lost nodes stay open",
        lambda: patch.object(NodeLinks, "forget", _only_forget),
    ),
    "fenced": (
        "a link that has been given up sends on: its agent hears from its controller, and its tasks go on",
        lambda: patch.object(ResumableLink, "abandon", lambda _: None),
    ),
    "met": (
        "a takeover does not know a node that has answered between two attempts, and starts the cluster again",
        lambda: patch.object(Pauses, "_note_met", lambda *_: None),
    ),
    "budget": (
        "no restart counts",
        lambda: patch.object(supervisor, "price", _never_count),
    ),
    "ports": (
        "a resume fails with a bug if a full disk has kept the port of a task out of the journal",
        lambda: patch.object(resume, "_has_ports", lambda *_: True),
    ),
    "leftovers": (
        "a resume starts the cluster again beside the tasks that it could not take over",
        lambda: patch.object(controllers, "prepare", _leave_all),
    ),
    "stacks": (
        "a node is lost for a protocol error, because it reports stacks of tasks that the next attempt has elsewhere",
        lambda: patch.object(AttemptRunner, "show_stacks", _show_stacks_always),
    ),
    "orders": (
        "orders that were under way when a connection broke are lost",
        lambda: patch.object(FrameSender, "attach", _attach_without_rest),
    ),
    "stamps": (
        "the lease of an agent is never renewed, because its controller does not return the stamps of its beats",
        lambda: patch.object(FrameSender, "note_beat", _keep_no_stamp),
    ),
    "again": (
        "over a new connection, an agent sends reports again that have arrived",
        lambda: patch.object(Connection, "replace", _replace_with_all),
    ),
    "rewind": (
        "over a new connection, an agent does not send again the parts of logs that were under way",
        lambda: patch.object(RunningTasks, "rewind", lambda *_: None),
    ),
}
"""Each with what it does, and how it is put back."""


def put_back(name: str) -> contextlib.AbstractContextManager[Any]:
    """Puts a defect back; none if the name is empty."""
    return DEFECTS[name][1]() if name else contextlib.nullcontext()
