"""Progress messages of a run: a line for each important event. Pure."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator

from launcher.gang.claims import render_busy_gpus
from launcher.gang.events import (
    EndAnnounced,
    Event,
    Interrupted,
    NodeLost,
    NodeSynced,
    TaskExited,
    TaskHalted,
    TaskListening,
    TaskReported,
)
from launcher.gang.restarts import Restart
from launcher.gang.state import BEFORE_START, AttemptState, Phase, Reason
from launcher.gang.waiting import render_waiting
from launcher.gang.watch.stalls import AGAIN_S, render_busy
from launcher.spec.nodes import LOOPBACK
from launcher.spec.strategies import JOIN_CALLS
from launcher.tasks import LOCAL, TENSORBOARD, name_tasks
from launcher.verdict.causes import find_cause
from launcher.verdict.stall_blame import render_stall
from launcher.wording import count_of, render_duration
from worker_entry.protocol.strategy_names import NO_STRATEGY
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import TaskExit

OWN_STRATEGY_HINT = (
    "build it with worker_entry.strategies.from_environment(), or run one task with all devices (--strategy mirrored)"
)
REMIND_S = 5.0
TRANSFER_REMIND_S = 10.0
GPUS_CHANGED_S, GPUS_REMIND_S = 60.0, 1800.0
"""How often the users of the awaited GPUs are reported: if they have changed, and if they are the same."""
FORMING_REMIND_S = 15.0
"""Longer than REMIND_S: importing TensorFlow takes a while."""
SHOWN_NODES = 8


def render_news(before: AttemptState, after: AttemptState, event: Event) -> str | None:
    """The line for the event between the two states; None if the event needs no line."""
    if before.reason is None and after.reason is Reason.TASK_FAILED:
        return _render_failure(after, event)
    return _render_event(before, after, event) or _render_change(before, after)


def _render_event(before: AttemptState, after: AttemptState, event: Event) -> str | None:
    """The line for what has happened."""
    has_effect = after is not before
    match event:
        case Interrupted() if after.phase is Phase.STOPPING:
            return _render_interruption(before, after, event)
        case EndAnnounced() if event.reference and has_effect:
            return f"{_sentence(event.message)}{_render_grace(event)}"
        case TaskExited(task) if after.restarted is not before.restarted:
            return f"{task} ended with {event.exit}; restarting it while the others continue"
        case TaskExited(task) if task == TENSORBOARD and task not in after.stopped:
            return f"TensorBoard ended with {event.exit}; the tasks continue; see tensorboard-0.log"
        case TaskListening(task) if task == TENSORBOARD and has_effect:
            return _render_board(after)
        case TaskHalted(task, signum) if has_effect and signum is None:
            return f"{task} continues"
        case TaskHalted(task, signum) if has_effect:
            return f"{task} was stopped by {TaskExit(signal=signum)}; the others wait for it"
        case NodeLost(node, reason) if has_effect and after.reason is None and not after.needs(node):
            return f"Node {node} was lost: {reason}; the training does not need it"
        case NodeSynced(node) if event.newer:
            return f"{node} keeps its checkpoints, which are newer than the collected ones"
        case NodeSynced(node) if event.files:
            what = f"{count_of(event.files, 'file')} ({render_size(event.fetched)})"
            return f"Sent {f'the last checkpoint, {what},' if event.checkpoint else what} to {node}"
        case TaskReported():
            return _render_report(before, after, event)
    return None


def _render_report(before: AttemptState, after: AttemptState, event: TaskReported) -> str | None:
    """The line for what a program has reported for the first time."""
    if faults := _find_new_faults(before, event):
        return f"{event.task}: injecting {', '.join(faults)}, as --chaos asked for"
    if event.own_resolver and not _own_resolvers(before):
        return (
            f"{event.task} builds {event.own_resolver}, which does not find this cluster: "
            "build the strategy without it, and it finds the cluster in TF_CONFIG"
        )
    if event.own_tf_config and not _own_configs(before):
        return _render_own_config(event)
    if after.divergence and not before.divergence:
        return _sentence(after.divergence)
    return render_separate(after) if after.separate and not before.separate else None


def _render_change(before: AttemptState, after: AttemptState) -> str | None:
    """The line for a change that no single event reports."""
    if after.policy.keeps_auxiliary and after.is_over and not before.is_over:
        return "Training has ended; TensorBoard keeps running until Ctrl-C"
    if after.busy and after.busy != before.busy:
        return render_busy(after)
    if after.waited and not before.waited:
        return f"{render_stall(after).capitalize()}, and all tasks wait; looking at them again in {AGAIN_S:.0f} s"
    if before.suspicion is None and after.suspicion is Reason.STALLED and after.policy.stall_s is not None:
        return f"{render_stall(after).capitalize()}; collecting the stacks of all tasks"
    is_exact = before.suspicion is Reason.STALLED and before.policy.stall_s is not None
    suspected = before.phase is Phase.RUNNING and (is_exact or before.seems_stalled)
    if suspected and after.phase is Phase.RUNNING and after.suspicion is None and not after.seems_stalled:
        return "The cluster makes progress again"
    if before.phase is Phase.FORMING and after.phase is Phase.RUNNING and _is_up(after):
        first = min(event.time for event in after.started.values())
        seconds = max(0.0, *(event.time - first for event in after.listening.values()))
        joining = after.policy.trainers if after.policy.strategy.reports_joining else after.policy.forming
        count = len(joining)
        return f"The cluster is up after {render_duration(seconds)}: {count_of(count, 'task')}"
    return None


def _render_failure(state: AttemptState, event: Event) -> str:
    """The line for the failure that stops the others."""
    cause = find_cause(state, {})
    assert cause is not None
    ended = cause.exited
    if ended.task not in state.exits and ended.crash is not None:
        stays = "" if isinstance(event, TaskExited) else ", and its process does not end"
        return f"{ended.task} has failed with {ended.crash.exception}{stays}; stopping all"
    others = f"; stopping {', '.join(map(str, sorted(state.stopped)[:8]))}" if state.stopped else ""
    return f"{ended.task} ended with {ended.exit}{others}{' …' if len(state.stopped) > 8 else ''}"


def _render_grace(event: EndAnnounced) -> str:
    return "" if event.stays else f"; its tasks have {event.grace_s:.0f} s to save and end"


def render_patches(event: Event) -> Iterator[str]:
    """The lines about the task's Keras; identical for all tasks, so each is needed once."""
    if not isinstance(event, TaskReported) or event.keras is None:
        return
    keras = f"Keras {event.keras.version}"
    if event.keras.faults:
        faults = count_of(event.keras.faults, "fault")
        off = "--set keras.patch=false turns this off"
        yield f"{keras}: {faults} patched for multi-worker training ({off})"
    if event.keras.changed:
        changed = ", ".join(event.keras.changed)
        yield f"{keras} has changed this code, so it is not patched, and training may fail or be wrong: {changed}"


def _render_board(state: AttemptState) -> str:
    port = state.ports[TENSORBOARD]
    node = next(node for node, tasks in state.policy.nodes.items() if TENSORBOARD in tasks)
    place = f"http://{LOOPBACK}:{port}/"
    if node == LOCAL:
        return f"TensorBoard is at {place}"
    return f"TensorBoard is on {node}: ssh -N -L {port}:{LOOPBACK}:{port} {node}, then {place}"


def render_restart(restart: Restart, attempt: int, limit: int) -> str:
    """The line before the pause."""
    cost = "not counted" if restart.free else f"restart {restart.count} of {limit}"
    when = f" in {restart.pause_s:g} s" if restart.pause_s else ""
    return f"Restarting{when}: attempt {attempt} ({cost})"


def _render_interruption(before: AttemptState, after: AttemptState, event: Interrupted) -> str | None:
    name = f"{signal.Signals(event.signal).name}: "
    if event.is_by_hand:
        name = "" if event.signal == signal.SIGINT else "distlaunch down: "
    if after.policy.only_checks:
        return _sentence(f"{name}stopping the checks") if before.phase is not Phase.STOPPING else None
    if before.phase is Phase.STOPPING:
        return "Killing all tasks" if event.signal == signal.SIGINT else None
    insist = "; Ctrl-C again kills them" if event.signal == signal.SIGINT else ""
    what = "interrupting" if event.is_by_hand else "stopping"
    return _sentence(f"{name}{what} all tasks, {after.policy.stop_grace_s:g} s grace{insist}")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def render_separate(state: AttemptState) -> str:
    """`worker:0, worker:1 train separately: the program does not use MultiWorkerMirroredStrategy; …`."""
    names = name_tasks(sorted(state.separate))
    if state.policy.strategy.reports_joining:
        return f"{names} train separately: the program does not call {' or '.join(JOIN_CALLS)}"
    built = sorted({state.status[task].strategy for task in state.separate if task in state.status} - {NO_STRATEGY})
    what = f"the program uses {', '.join(built)}, not" if built else "the program does not use"
    return f"{names} train separately: {what} MultiWorkerMirroredStrategy; {OWN_STRATEGY_HINT}"


def _find_new_faults(before: AttemptState, status: TaskReported) -> list[str]:
    known = before.status[status.task].injected if status.task in before.status else ()
    return [fault for fault in status.injected if fault not in known]


def _own_resolvers(state: AttemptState) -> bool:
    return any(status.own_resolver for status in state.status.values())


def _own_configs(state: AttemptState) -> bool:
    return any(status.own_tf_config for status in state.status.values())


def _render_own_config(status: TaskReported) -> str:
    line = status.own_tf_config
    if status.own_tf_config_kept:
        return f"{status.task} uses the program's TF_CONFIG ({line}), as keep_own_tf_config allows"
    return (
        f"{status.task} changes TF_CONFIG at {line}; TensorFlow uses the cluster's, or the program's with "
        "keep_own_tf_config=true"
    )


def _is_up(state: AttemptState) -> bool:
    return bool(state.policy.forming) and state.policy.forming <= state.listening.keys()


class Reminder:
    """Regular reports of what the run waits for, until the cluster is up.

    Args:
        started: monotonic seconds.
        transfers: how far the program's folder has been sent; empty if nothing is being sent.
    """

    def __init__(self, started: float, transfers: Callable[[], str] = lambda: "") -> None:
        self._started = started
        self._transfers = transfers
        self._due = started + REMIND_S
        self._busy = ""
        """The last report of busy GPUs; empty before the first, and once the GPUs are free."""
        self._busy_said = -math.inf
        self._drains: float | None = None
        """The deadline that the user was warned about."""

    def remind(self, state: AttemptState, now: float, time: float) -> str | None:
        """The line, if one is due; `now`: monotonic seconds, `time`: Unix seconds."""
        if state.lacks_gpus:
            return self._remind_of_gpus(state, now)
        if self._busy and state.reason is None:
            self._busy = ""
            self._started, self._due = now, now + REMIND_S
            return "The GPUs are free"
        if now < self._due:
            return None
        if state.phase is Phase.RUNNING:
            return self._remind_of_drain(state, now)
        if state.phase is Phase.FORMING and state.missing and state.started:
            forming_s = time - min(event.time for event in state.started.values())
            if forming_s < REMIND_S:
                self._due = now + REMIND_S - forming_s
                return None
            self._due = now + FORMING_REMIND_S
            return f"Forming, {forming_s:.0f} s: {render_waiting(state, time)}"
        if state.phase not in BEFORE_START:
            return None
        if state.phase is Phase.SYNCING and (sent := self._transfers()):
            self._due = now + TRANSFER_REMIND_S
            return f"Sending files: {sent}"
        self._due = now + REMIND_S
        missing = sorted(state.silent or state.awaited)
        shown = ", ".join(missing[:SHOWN_NODES]) + (
            f" and {len(missing) - SHOWN_NODES} more" * (len(missing) > SHOWN_NODES)
        )
        return f"{state.phase.value.capitalize()}, {now - self._started:.0f} s: waiting for {shown}"

    def _remind_of_gpus(self, state: AttemptState, now: float) -> str | None:
        """Reports who uses the GPUs: at once, soon after a change, and from time to time."""
        busy = render_busy_gpus(state.lacked)
        if now < self._busy_said + (GPUS_REMIND_S if busy == self._busy else GPUS_CHANGED_S):
            return None
        self._busy, self._busy_said = busy, now
        return f"Waiting for GPUs: {busy}"

    def _remind_of_drain(self, state: AttemptState, now: float) -> str | None:
        """A warning after half of the drain time."""
        if state.deadline is None or state.deadline == self._drains or not state.ended or state.suspicion is not None:
            return None
        left_s = state.deadline - now
        if left_s > state.policy.drain_s / 2:  # asked at each event: before anything is sorted
            return None
        going = sorted(state.policy.trainers - state.ended)
        leaving = sorted(state.policy.trainers - state.exits.keys())
        if not leaving:
            return None
        self._drains = state.deadline
        if not going:
            return (
                f"The program of {name_tasks(leaving)} has ended, and {'its' if len(leaving) == 1 else 'their'} "
                f"{'process has' if len(leaving) == 1 else 'processes have'} not; stopping in {left_s:.0f} s unless at "
                "work then (timeouts.drain_s)"
            )
        return (
            f"{name_tasks(going)} {'is' if len(going) == 1 else 'are'} still running, the others have ended; "
            f"stopping in {left_s:.0f} s unless at work then (timeouts.drain_s)"
        )
