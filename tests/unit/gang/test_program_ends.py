"""A program counts as ended even if its process still waits for peers, child processes or a signal handler."""

from __future__ import annotations

import signal

import pytest

from launcher.gang.decide import FAILURE_GRACE_S, RAISED_S, SAVING_S, STOP_MARGIN_S, decide
from launcher.gang.events import (
    Action,
    Event,
    Interrupted,
    NodeEmpty,
    NodeLost,
    ProgramEnded,
    StacksReceived,
    StopNodes,
    TaskExited,
    TaskReported,
    Tick,
)
from launcher.gang.state import AttemptState, Phase, Reason, make_exit
from launcher.verdict.causes import find_cause
from tests.harness.builders.gang import DRAIN_S, GRACE_S, TWO_NODES, W0, W1, exited, make_policy, play, play_on, running
from tests.harness.builders.verdicts import judged
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Activity, CrashRecord, TaskExit

CRASH = CrashRecord(1000.0, "ValueError", "no batch", "train.py", 9)
RAISED = ProgramEnded(W1, 1000.0, CRASH)
SAVED = replace(RAISED, crash=CrashRecord(1000.0, "SystemExit", "sys.exit(42)", exit_status=42))
KILLED = TaskExited(W1, TaskExit(None, signal.SIGKILL), 1005.0, CRASH)


def of(*events: Event | float, drain_s: float = DRAIN_S) -> tuple[AttemptState, list[Action]]:
    policy = make_policy(TWO_NODES, drain_s=drain_s)
    return play(policy, *running(policy), *events)


def test_the_end_of_a_program_is_turned_into_the_exit_that_its_process_owes() -> None:
    finished = TaskExited(W1, TaskExit(0), 1000.0, finished=1000.0, start=2)
    assert make_exit(ProgramEnded(W1, 1000.0, start=2)) == finished
    assert make_exit(replace(RAISED, start=2)) == TaskExited(W1, TaskExit(1), 1000.0, CRASH, start=2)
    assert make_exit(SAVED) == TaskExited(W1, TaskExit(42), 1000.0, SAVED.crash)


class TestRaised:
    def test_a_program_that_raised_fails_the_attempt_although_its_process_stays(self) -> None:
        state, actions = of(RAISED, RAISED_S - 0.1, Tick())
        assert (state.phase, state.reason) == (Phase.RUNNING, None)
        state, actions = of(RAISED, RAISED_S, Tick())
        assert actions[-1] == StopNodes(FAILURE_GRACE_S, longer={W1: GRACE_S})
        assert state.deadline == RAISED_S + GRACE_S + STOP_MARGIN_S
        state, _ = play_on(state, KILLED, exited(W0, signal=15), NodeEmpty("a"), NodeEmpty("b"))
        verdict = judged(state)
        assert (verdict.reference, verdict.task) == ("task-failed", "worker:1")
        assert verdict.evidence[0] == "ValueError: no batch   train.py:9"

    def test_a_program_that_raised_and_exited_is_an_ordinary_failure(self) -> None:
        _, actions = of(RAISED, 1.0, replace(KILLED, exit=TaskExit(1)))
        assert actions[-1] == StopNodes(FAILURE_GRACE_S)

    def test_a_program_that_raised_is_the_cause_even_if_its_node_is_lost(self) -> None:
        state, _ = of(RAISED, RAISED_S, Tick(), exited(W0, signal=15), NodeEmpty("a"), NodeLost("b", "gone"))
        cause = find_cause(state, {})
        assert cause is not None
        assert (cause.exited.task, cause.reference) == (W1, "task-failed")

    @pytest.mark.parametrize("stall_s", [None, 1.0])
    def test_a_program_that_raised_is_not_a_stall(self, stall_s: float | None) -> None:
        policy = replace(make_policy(TWO_NODES), stall_s=stall_s)
        state, _ = play(policy, *running(policy), RAISED, 3.0, Tick(), RAISED_S, Tick())
        assert state.reason is Reason.TASK_FAILED

    def test_a_program_that_exited_after_saving_leaves_time_for_others_to_save(self) -> None:
        handler = TaskReported(W1, "trains", 1000.0, saves_when_preempted=True)
        state, _ = of(handler, SAVED, SAVING_S - 1, Tick(), drain_s=0.0)
        assert state.reason is None
        state, _ = of(handler, SAVED, SAVING_S, Tick(), drain_s=0.0)
        assert state.reason is Reason.TASK_FAILED
        state, _ = of(SAVED, RAISED_S, Tick())
        assert state.reason is Reason.TASK_FAILED


class TestFinished:
    def test_a_finished_program_starts_the_drain_although_its_process_stays(self) -> None:
        waits = StacksReceived({W0: "", W1: ""}, {W0: Activity(), W1: Activity()})
        state, _ = of(ProgramEnded(W1, 1000.0), DRAIN_S, Tick(), waits)
        assert state.reason is Reason.DRAIN_TIMEOUT
        verdict = judged(play_on(state, exited(W0, signal=9), exited(W1, signal=9), NodeEmpty("a"), NodeEmpty("b"))[0])
        assert verdict.message.startswith("worker:0 did not end within 300 s")

    def test_a_finished_program_succeeds_although_its_process_never_exits(self) -> None:
        ends = (exited(W0), 10.0, ProgramEnded(W1, 1000.0))
        state, _ = of(*ends, 10.0 + DRAIN_S - 1.0, Tick())
        assert (state.reason, state.suspicion) == (None, None)
        state, _ = of(*ends, 10.0 + DRAIN_S, Tick(), StacksReceived({}, {}))
        assert state.reason is Reason.SUCCEEDED
        late = TaskExited(W1, TaskExit(None, signal.SIGKILL), 1400.0, finished=1000.0)
        verdict = judged(play_on(state, late, NodeEmpty("a"), NodeEmpty("b"))[0])
        assert verdict.reference == "succeeded"
        [sentence] = verdict.evidence
        assert sentence.startswith("worker:1 finished its program before its interpreter ended with SIGKILL")

    def test_the_drain_is_extended_while_the_process_of_a_finished_program_works(self) -> None:
        active = StacksReceived({}, {W1: Activity(idle_s=0.0)})
        state, _ = of(exited(W0), ProgramEnded(W1, 1000.0), DRAIN_S, Tick(), active)
        assert (state.reason, state.busy) == (None, {W1: "at work"})
        state, _ = play_on(state, 2 * DRAIN_S, Tick(), StacksReceived({}, {}))
        assert state.reason is Reason.SUCCEEDED

    def test_an_interruption_after_all_programs_finished_is_a_success(self) -> None:
        state, actions = of(exited(W0), ProgramEnded(W1, 1000.0), Interrupted(signal.SIGINT))
        assert (state.reason, actions[-1]) == (Reason.SUCCEEDED, StopNodes(GRACE_S, interrupts=True))

    def test_the_node_of_a_finished_program_may_be_lost(self) -> None:
        state, _ = of(ProgramEnded(W1, 1000.0), NodeLost("b", "gone"))
        assert state.reason is None
        state, _ = decide(state, exited(W0), 1.0)
        assert state.reason is Reason.SUCCEEDED
        assert judged(state).reference == "succeeded"

    @pytest.mark.parametrize("others", [(), (exited(W0),)])
    def test_the_attempt_fails_if_the_node_of_a_program_that_raised_is_lost(self, others: tuple[Event, ...]) -> None:
        state, _ = of(*others, RAISED, NodeLost("b", "gone"))
        assert state.reason is Reason.TASK_FAILED
        cause = find_cause(state, {})
        assert cause is not None
        assert (cause.exited.task, judged(state).reference) == (W1, "task-failed")

    def test_the_others_may_save_although_the_node_of_a_program_that_has_saved_is_lost(self) -> None:
        saves = TaskReported(W1, "trains", 1000.0, saves_when_preempted=True)
        state, _ = of(saves, SAVED, NodeLost("b", "gone"), SAVING_S - 1.0, Tick())
        assert state.reason is None
        state, _ = decide(state, Tick(), SAVING_S)
        assert state.reason is Reason.TASK_FAILED
