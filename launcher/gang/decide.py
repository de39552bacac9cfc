"""The rules by which a cluster lives and dies, as a pure function: `decide(state, event) → (state, actions)`.

MultiWorkerMirroredStrategy is all or nothing. An attempt succeeds when every chief and worker ends with status 0; the
first one that fails decides, and all others are stopped. An evaluator only watches: its end decides nothing.

With ParameterServerStrategy the chief decides. The others serve and never end; a worker that does end restarts
individually. `policy` has the table of which tasks count for what.

`facts.apply` records the facts; the rules here decide by the recorded facts, and not by the order in which they became
known. So a later controller that knows the same facts comes to the same decision, and a training has succeeded if all
of its tasks had finished before their agents began to stop them, although we have ordered the stop. Only time limits
depend on when a controller saw an event; they start again at a takeover, and none ends a running attempt while the
connection to a node that it needs is broken: the lease bounds that time.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from launcher.gang.claims import ask_all, go_on
from launcher.gang.events import (
    Action,
    AskStacks,
    Checked,
    CheckNodes,
    EndAnnounced,
    Event,
    Finish,
    Interrupted,
    NodeAttached,
    NodeHeard,
    PrepareNodes,
    ProgramEnded,
    RestartTask,
    StacksReceived,
    StartTasks,
    StopNodes,
    SyncNodes,
    TaskExited,
)
from launcher.gang.facts import apply, is_relevant
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import BEFORE_START, AttemptState, Phase, Reason, make_exit
from launcher.gang.watch.stacks import is_out_of_step
from launcher.gang.watch.stalls import find_busy, is_excused, is_progress, is_stalled, note_look, note_progress
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import replace

RAISED_S = 4.5
"""How long the process of a program that has raised may stay: its exit handlers may wait for ever, as JAX's do for the
other tasks."""
INTERRUPT_S = 3.0
"""From SIGINT to SIGTERM for a program that does not react: its main thread is in C++, where Python cannot raise
KeyboardInterrupt."""
FAILURE_GRACE_S = 1.0
"""From SIGTERM to SIGKILL after a failure: the others cannot continue, and TensorFlow ignores SIGTERM."""
SAVING_S = 300.0
"""How long the others may still save, once the first worker has saved because of a preemption, and has ended."""
SIGNALLED_GRACE_S = 600.0
"""From SIGTERM to SIGKILL after a SIGTERM from Slurm, until Slurm reports how long the tasks may run."""
STOP_MARGIN_S = 30.0
"""How long after the last SIGKILL a node may take to report that no process is left."""
STACKS_S = 10.0
"""How long all tasks may take to report what they are doing, before they are stopped for lack of progress."""

NOBODY: Mapping[TaskId, float] = {}

Decision = tuple[AttemptState, tuple[Action, ...]]


def new_attempt(policy: AttemptPolicy, now: float) -> AttemptState:
    """An attempt that begins now."""
    return AttemptState(policy, deadline=now + policy.start_s if policy.start_s else None)


def decide(state: AttemptState, event: Event, now: float) -> Decision:
    """The state after an event, and the actions that follow.

    Args:
        state: the state so far.
        event: what has happened.
        now: the controller's monotonic clock, in seconds.
    """
    if state.phase is Phase.FINISHED or not is_relevant(state, event):
        return state, ()
    before, state = state, apply(state, event)
    if state.phase is Phase.STOPPING:
        return _while_stopping(state, event, now)
    if isinstance(event, (NodeHeard, NodeAttached)) and before.is_blind:
        state = _give_time(state, now)
    if is_progress(state, event):
        state = note_progress(state, now)
    if (isinstance(event, Interrupted) or state.is_taken_away) and state.is_done:
        is_leaving = state.policy.trainers - state.exits.keys()  # its program has ended, and its interpreter has not
        grace_s = state.policy.stop_grace_s if is_leaving or state.interrupts else FAILURE_GRACE_S
        return _stop(state, Reason.SUCCEEDED, grace_s, now, interrupts=state.interrupts)
    if state.signal is not None:
        return _stop(state, Reason.INTERRUPTED, state.policy.stop_grace_s, now, interrupts=state.interrupts)
    if state.announced is not None and state.is_taken_away:
        return _stop(state, Reason.ANNOUNCED, state.announced.grace_s, now)
    if not state.policy.only_checks:
        if any(state.needs(refusal.node) for refusal in state.refusals):
            return _stop(state, Reason.REFUSED, FAILURE_GRACE_S, now)
        if state.phase is not Phase.CONNECTING and any(map(state.needs, state.lost)):
            return _stop(state, Reason.NODE_LOST, FAILURE_GRACE_S, now)
    if before.detached and not state.detached:
        return _after_takeover(state, now)
    if state.raised and (state.raised_due is None or isinstance(event, ProgramEnded)):
        due = now + (SAVING_S if all(map(state.has_saved, map(make_exit, state.raised))) else RAISED_S)
        state = replace(state, raised_due=due if state.raised_due is None else min(due, state.raised_due))
    if state.restarted is not before.restarted and isinstance(event, TaskExited):
        return state, (RestartTask(event.task),)
    if state.phase in BEFORE_START:
        return _before_start(state, event, now)
    if state.failures:
        return _while_failing(state, event, now)
    if state.raised and _is_raised_final(state, now):
        longer = {program.task: state.policy.stop_grace_s for program in state.raised}
        return _stop(state, Reason.TASK_FAILED, FAILURE_GRACE_S, now, longer=longer)
    return _while_running(before, state, event, now)


def take_over(state: AttemptState) -> AttemptState:
    """The state of a running attempt that an earlier controller has left; `state` has the known facts.

    No time limit runs before all of its nodes are attached again: until then, the tasks' reports cannot arrive.
    """
    return replace(state, phase=Phase.RUNNING, detached=state.occupied)


def _give_time(state: AttemptState, now: float) -> AttemptState:
    """Once a node is connected again, no time limit ends the attempt before the node's reports have arrived."""
    deadline = max(state.deadline, now + STACKS_S) if state.deadline is not None else None
    return replace(state, deadline=deadline, last_progress=now, waited=False)


def _is_raised_final(state: AttemptState, now: float) -> bool:
    """Whether programs that have raised count as failed although their processes have not been seen to end."""
    gone = [make_exit(program) for program in state.raised if program.task in state.unreachable]
    is_due = state.raised_due is not None and now >= state.raised_due
    return is_due or not all(map(state.has_saved, gone))  # the others may still save


def _after_takeover(state: AttemptState, now: float) -> Decision:
    """Restarts all time limits, and repeats restart orders that may not have arrived."""
    ended = state.ended
    limit_s = SAVING_S if state.failures else state.policy.drain_s if ended else 0.0
    state = replace(state, last_progress=now, deadline=now + limit_s if limit_s else None)
    # Only these: if the journal lacks another start, lines of it are lost, and the task may have run and ended.
    missing = state.restarted.keys() - state.started.keys() - state.exits.keys() - state.unreachable
    return state, tuple(RestartTask(task) for task in sorted(missing))


def _before_start(state: AttemptState, event: Event, now: float) -> Decision:
    if state.phase is Phase.CONNECTING and state.has_met_all:
        # All nodes have answered by now, so the user sees all obstacles at once.
        if state.lost and not state.policy.only_checks:
            return _stop(state, Reason.NODE_LOST, FAILURE_GRACE_S, now)
        if not state.awaited:
            return _stop(state, Reason.CHECKED, 0.0, now)
        if state.waits_for_gpus:
            return ask_all(state, now)
        return _bring_files(state)
    if state.phase is Phase.CLAIMING and not state.asked:
        if not state.lacking:
            limit_s = state.policy.start_s
            return _bring_files(replace(state, deadline=now + limit_s if limit_s else None))
        if state.claims_again is None and state.claims_due is not None and now >= state.claims_due:
            return _stop(state, Reason.GPUS_BUSY, FAILURE_GRACE_S, now)
        return go_on(state, now)
    if state.phase is Phase.SYNCING and state.is_synced:
        return replace(state, phase=Phase.PREPARING), (PrepareNodes(),)
    if state.phase is Phase.PREPARING and state.is_prepared:
        if state.policy.checks:
            return replace(state, phase=Phase.CHECKING), (CheckNodes(),)
        return replace(state, phase=Phase.FORMING), (StartTasks(state.ports),)
    if state.phase is Phase.CHECKING and isinstance(event, Checked):
        if state.policy.only_checks:
            return _stop(state, Reason.CHECKED, 0.0, now)
        return replace(state, phase=Phase.FORMING), (StartTasks(state.ports),)
    if _is_due(state, now):
        return _stop(state, Reason.START_TIMEOUT, FAILURE_GRACE_S, now)
    return state, ()


def _bring_files(state: AttemptState) -> Decision:
    if (state.policy.syncs | state.policy.restores) & state.awaited:
        return replace(state, phase=Phase.SYNCING), (SyncNodes(),)
    return replace(state, phase=Phase.PREPARING), (PrepareNodes(),)


def _while_failing(state: AttemptState, event: Event, now: float) -> Decision:
    """Stops the others, unless they may still save, or report more about the failure."""
    over = state.policy.trainers <= state.exits.keys()
    if state.suspicion is Reason.TASK_FAILED:  # all tasks report where they are before they are stopped
        over = over or isinstance(event, StacksReceived) or _is_due(state, now)
        return _stop(state, Reason.TASK_FAILED, FAILURE_GRACE_S, now) if over else (state, ())
    failures = [failure for failure in state.failures if not state.has_saved(failure)]
    if over or not all(map(is_out_of_step, failures)):
        # After SIGKILL the cause is known: whatever the others still report, they did not cause it.
        certain = any(failure.exit.signal == signal.SIGKILL for failure in failures)
        return _stop(state, Reason.TASK_FAILED, FAILURE_GRACE_S, now, for_handlers=certain)
    if failures:
        return _suspect(replace(state, suspicion=None), Reason.TASK_FAILED, event, now)
    if isinstance(event, TaskExited) and len(state.failures) == 1:
        state = replace(state, deadline=now + SAVING_S)
    return _stop(state, Reason.TASK_FAILED, FAILURE_GRACE_S, now) if _is_due(state, now) else (state, ())


def _while_running(before: AttemptState, state: AttemptState, event: Event, now: float) -> Decision:
    trainers, ended = state.policy.trainers, state.ended
    has_ended = len(ended) == len(trainers)
    drained = now + state.policy.drain_s if state.policy.drain_s else None
    trainer_ended = isinstance(event, (ProgramEnded, TaskExited)) and event.task in trainers
    if state.phase is Phase.FORMING:
        # A trainer that has ended successfully needed no cluster, or had one: ports no longer matter.
        if (ended or state.is_up) and state.have_started:
            state = replace(
                state, phase=Phase.RUNNING, deadline=drained if ended else None, suspicion=None, last_progress=now
            )
        elif state.suspicion is not None or _is_due(state, now):
            return _suspect(state, Reason.START_TIMEOUT, event, now)
    elif trainer_ended and len(before.ended) != len(ended) and (len(ended) == 1 or has_ended):
        state = replace(state, deadline=drained)
    if has_ended:
        return _while_ending(state, event, now)
    if state.phase is Phase.RUNNING and not state.detached:
        return _while_training(state, event, now)
    return state, ()


def _while_ending(state: AttemptState, event: Event, now: float) -> Decision:
    """All trainers' programs have ended; processes and other tasks may still be there."""
    # Until the deadline, an evaluator may still look at the last checkpoint.
    if state.policy.keeps_auxiliary and not state.have_ended(state.policy.auxiliary) and state.is_over:
        return replace(state, deadline=None), ()
    # A process may stay after the end of its program, and may still be at work.
    if not state.have_ended(state.policy.trainers):
        is_suspect = state.suspicion is Reason.DRAIN_TIMEOUT or _is_due(state, now)
        return _suspect(state, Reason.DRAIN_TIMEOUT, event, now) if is_suspect else (state, ())
    if state.is_over or _is_due(state, now):
        return _stop(state, Reason.SUCCEEDED, FAILURE_GRACE_S, now)
    return state, ()


def _while_training(state: AttemptState, event: Event, now: float) -> Decision:
    """At least one trainer trains."""
    if is_stalled(state, now):
        return _suspect(state, Reason.STALLED, event, now)
    if state.ended and (state.suspicion is Reason.DRAIN_TIMEOUT or _is_due(state, now)):
        return _suspect(state, Reason.DRAIN_TIMEOUT, event, now)
    if state.suspicion is not None:  # there is progress again
        state = replace(state, suspicion=None, deadline=state.deadline if state.ended else None)
    return state, ()


def _suspect(state: AttemptState, reason: Reason, event: Event, now: float) -> Decision:
    """Asks the tasks what they are doing before it stops them; tasks at work continue."""
    if state.is_blind:
        return replace(state, suspicion=None, waited=False), ()
    if state.suspicion is None:
        stalled_s = now - state.last_progress if state.last_progress is not None else 0.0
        return replace(state, suspicion=reason, stalled_s=stalled_s, deadline=now + STACKS_S), (AskStacks(),)
    if isinstance(event, StacksReceived):
        busy = find_busy(state)
        if is_excused(state, reason, busy):
            limit_s = state.policy.start_s if reason is Reason.START_TIMEOUT else state.policy.drain_s
            return replace(state, suspicion=None, busy=busy, deadline=now + limit_s), ()
    elif not _is_due(state, now):
        return state, ()
    else:
        state = replace(state, stacks={}, activity={})  # those are of an earlier look
    if reason is Reason.STALLED and state.policy.stall_s is None:
        looked = note_look(state, now)
        if not (state.waited and looked.waited):
            return looked, ()
    return _stop(state, Reason.SUCCEEDED if state.is_done else reason, FAILURE_GRACE_S, now)


def _while_stopping(state: AttemptState, event: Event, now: float) -> Decision:
    # Ctrl-C while stopping means: stop at once. TERM and HUP do not, because they may arrive twice without the user
    # (`timeout`, a closed window); nor does PIPE, which follows when Ctrl-C has also ended the reader of our output.
    if isinstance(event, Interrupted) and event.signal == signal.SIGINT:
        assert state.deadline is not None
        deadline = min(state.deadline, now + STOP_MARGIN_S)
        return replace(state, deadline=deadline, interrupt_due=None), (StopNodes(0.0),)
    if isinstance(event, EndAnnounced):
        grace_s = event.grace_s if state.is_taken_away else FAILURE_GRACE_S
        deadline = now + grace_s + STOP_MARGIN_S
        if state.deadline is not None and deadline < state.deadline:  # this limit was not known before
            return replace(state, deadline=deadline), (StopNodes(grace_s),)
    # Nothing was started on a node whose agent has not answered; its link ends by itself.
    if _is_due(state, now):
        silent = state.ready - state.empty.keys() - state.lost.keys()
        reasons = dict.fromkeys(silent, "did not report that all of its processes have ended")
        state = replace(state, lost={**state.lost, **reasons})
    if state.is_empty:
        return _finish(state), (Finish(),)
    if state.interrupt_due is not None and now >= state.interrupt_due and not state.saving:
        insists = bool(state.stopped - state.exits.keys() - state.interrupted)
        return replace(state, interrupt_due=None), (StopNodes(FAILURE_GRACE_S),) if insists else ()
    return state, ()


def _stop(
    state: AttemptState,
    reason: Reason,
    grace_s: float,
    now: float,
    *,
    for_handlers: bool = False,
    longer: Mapping[TaskId, float] = NOBODY,
    interrupts: bool = False,
) -> Decision:
    """Begins to stop all tasks.

    Args:
        state: the state so far.
        reason: why.
        grace_s: how long the tasks may stay.
        now: the controller's monotonic clock.
        for_handlers: whether only tasks that handle SIGTERM, and those in `longer`, get the grace.
        longer: the graces of tasks that get a longer grace.
        interrupts: whether the tasks get SIGINT first.
    """
    if state.signalled and state.announced is None and reason is not Reason.SUCCEEDED:
        grace_s, for_handlers, longer, interrupts = SIGNALLED_GRACE_S, False, NOBODY, False
    state = replace(
        state,
        phase=Phase.STOPPING,
        reason=reason,
        stopped=frozenset(state.started.keys() - state.exits.keys()),
        deadline=now + max(grace_s, *longer.values(), 0.0) + STOP_MARGIN_S,
        interrupt_due=now + INTERRUPT_S if interrupts else None,
    )
    if state.is_empty:
        return _finish(state), (Finish(),)
    return state, (StopNodes(grace_s, for_handlers, interrupts, longer),)


def _finish(state: AttemptState) -> AttemptState:
    """The end of the attempt, which has succeeded if our stop came too late to end any trainer."""
    had_ended = state.is_done and not (state.interrupts and state.stopped & state.policy.trainers)
    reason = Reason.SUCCEEDED if had_ended else state.reason
    return replace(state, phase=Phase.FINISHED, deadline=None, reason=reason)


def _is_due(state: AttemptState, now: float) -> bool:
    return state.deadline is not None and now >= state.deadline and not state.is_blind
