"""The rules of a gang whose tasks serve a chief: ParameterServerStrategy."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from launcher.gang.decide import FAILURE_GRACE_S, decide, new_attempt
from launcher.gang.events import (
    Event,
    Finish,
    Interrupted,
    NodeEmpty,
    NodeLost,
    ProgramEnded,
    RestartTask,
    StopNodes,
    TaskHalted,
    TaskReported,
    TaskStarted,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, IndividualRestart, Phase, Reason
from launcher.spec.strategies import RULES, TORCH, find_role_problem
from launcher.tasks import TENSORBOARD, TaskId, parse_task_id
from launcher.verdict.causes import find_cause
from tests.harness.builders.gang import DRAIN_S, GRACE_S, exited, listening, play, play_on, preparing, started
from tests.harness.builders.verdicts import judged

CHIEF, W0, W1, PS, EVALUATOR = (
    parse_task_id(text) for text in ("chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0")
)
FAILURE_STOP = StopNodes(FAILURE_GRACE_S)
MAX_INDIVIDUAL_RESTARTS = 2


def make_policy(nodes: Mapping[str, Iterable[TaskId]] | None = None) -> AttemptPolicy:
    tasks = {node: frozenset(of_node) for node, of_node in (nodes or {"a": [CHIEF, W0, W1, PS]}).items()}
    forming = frozenset(task for task in frozenset().union(*tasks.values()) if task.type != "evaluator")
    return AttemptPolicy(
        tasks,
        forming,
        start_s=600.0,
        drain_s=DRAIN_S,
        stop_grace_s=GRACE_S,
        strategy=RULES["parameter_server"],
        max_individual_restarts=MAX_INDIVIDUAL_RESTARTS,
    )


def ends_and_starts(task: TaskId, number: int, code: int) -> tuple[Event, Event]:
    """The end of the task's `number`-th start, and its next start."""
    return replace(exited(task, code), start=number), TaskStarted(task, 7, 1000.0, number + 1)


def running(policy: AttemptPolicy) -> list[Event]:
    return [*preparing(policy), *started(*sorted(policy.tasks)), *listening(*sorted(policy.forming))]


def test_a_parameter_server_cluster_is_up_when_all_ports_are_open() -> None:
    policy = make_policy()
    state, _ = play(policy, *running(policy)[:-1])
    assert state.phase is Phase.FORMING
    state, _ = play(policy, *running(policy))
    assert state.phase is Phase.RUNNING


def test_the_success_of_the_chief_ends_the_attempt_and_stops_the_rest() -> None:
    policy = make_policy()
    state, actions = play(policy, *running(policy), exited(CHIEF))
    assert (state.reason, actions[-1]) == (Reason.SUCCEEDED, FAILURE_STOP)
    assert state.stopped == {W0, W1, PS}
    state, _ = play(
        policy, *running(policy), exited(CHIEF), *(exited(t, signal=15) for t in (W0, W1, PS)), NodeEmpty("a")
    )
    assert state.phase is Phase.FINISHED
    assert find_cause(state, {}) is None


@pytest.mark.parametrize("how", [{"code": 1}, {"code": 0}, {"code": None, "signal": signal.SIGKILL}])
def test_a_worker_of_a_chief_is_restarted_individually_after_any_exit(how: dict[str, int]) -> None:
    policy = make_policy()
    state, actions = play(policy, *running(policy), exited(W1, how["code"], signal=how.get("signal")))
    assert actions[-1] == RestartTask(W1)
    assert (state.phase, state.reason) == (Phase.RUNNING, None)
    assert W1 not in state.started
    state, _ = decide(state, TaskStarted(W1, 200, 1020.0, 2), 0.0)
    state, _ = decide(state, listening(W1)[0], 0.0)
    state, _ = decide(state, exited(CHIEF), 0.0)
    assert state.reason is Reason.SUCCEEDED


def test_nothing_but_its_end_is_kept_of_a_worker_that_restarts_individually() -> None:
    policy = make_policy()
    reported = TaskReported(W1, "trains", 1005.0)
    end = exited(W1, 1)
    news = (reported, TaskHalted(W1, signal.SIGSTOP, 1006.0), ProgramEnded(W1, 1009.0), end)
    state, _ = play(policy, *running(policy), *news)
    assert state.restarted == {W1: (IndividualRestart(end, reported),)}
    kept = (state.started, state.listening, state.status, state.halted, state.programs, state.exits)
    assert [W1 in facts for facts in kept] == [False] * len(kept)
    assert {W0, PS} < state.started.keys() & state.listening.keys()
    repeated, _ = play_on(state, started(W1)[0], ProgramEnded(W1, 1009.0), end)
    assert repeated == state


def test_a_worker_beyond_its_restart_limit_is_the_cause_of_the_failure() -> None:
    policy = make_policy()
    again = [event for number in range(1, MAX_INDIVIDUAL_RESTARTS + 1) for event in ends_and_starts(W1, number, 3)]
    state, actions = play(policy, *running(policy), *again)
    assert actions[-MAX_INDIVIDUAL_RESTARTS:] == [RestartTask(W1)] * MAX_INDIVIDUAL_RESTARTS
    state, actions = play(policy, *running(policy), *again, replace(exited(W1, 3), start=MAX_INDIVIDUAL_RESTARTS + 1))
    assert (state.reason, actions[-1]) == (Reason.TASK_FAILED, FAILURE_STOP)
    cause = find_cause(state, {})
    assert cause is not None
    assert cause.exited.task == W1


def test_individual_restarts_are_counted_per_worker() -> None:
    policy = make_policy()
    numbers = range(1, MAX_INDIVIDUAL_RESTARTS + 1)
    events = [event for number in numbers for w in (W0, W1) for event in ends_and_starts(w, number, 1)]
    state, _ = play(policy, *running(policy), *events)
    assert state.reason is None


@pytest.mark.parametrize("how", [0, 1])
def test_a_parameter_server_that_ends_fails_the_attempt(how: int) -> None:
    policy = make_policy()
    state, actions = play(policy, *running(policy), exited(PS, how))
    assert (state.reason, actions[-1]) == (Reason.TASK_FAILED, FAILURE_STOP)
    cause = find_cause(state, {})
    assert cause is not None
    assert cause.exited.task == PS


@pytest.mark.parametrize("code", [0, 1])
def test_a_failed_parameter_server_stays_the_cause_after_the_chief_ends(code: int) -> None:
    policy = make_policy()
    died = replace(exited(PS, 1), time=1005.0)
    state, _ = play(policy, *running(policy), died, exited(CHIEF, code), exited(W0, signal=15))
    cause = find_cause(state, {})
    assert cause is not None
    assert cause.exited.task == PS


def test_a_failed_chief_is_the_cause_although_servers_are_stopped_later() -> None:
    policy = make_policy()
    state, _ = play(policy, *running(policy), exited(CHIEF, 1), exited(PS, signal=15))
    cause = find_cause(state, {})
    assert state.reason is Reason.TASK_FAILED
    assert cause is not None
    assert cause.exited.task == CHIEF


def test_the_loss_of_a_worker_node_fails_a_parameter_server_attempt() -> None:
    policy = make_policy({"a": [CHIEF, PS], "b": [W0], "c": [W1]})
    state, _ = play(policy, *running(policy), NodeLost("c", "gone"))
    assert state.reason is Reason.NODE_LOST


def test_only_an_evaluator_gets_the_drain_time_after_the_chief_succeeds() -> None:
    policy = make_policy({"a": [CHIEF, W0, PS, EVALUATOR]})
    state, _ = play(policy, *running(policy), exited(CHIEF))
    assert state.reason is None
    later, _ = decide(state, exited(EVALUATOR), 1.0)
    assert later.reason is Reason.SUCCEEDED
    later, _ = decide(state, Tick(), DRAIN_S + 1)
    assert later.reason is Reason.SUCCEEDED
    assert EVALUATOR in later.stopped


def test_a_server_that_fails_after_the_chief_succeeded_is_ignored() -> None:
    policy = make_policy({"a": [CHIEF, W0, PS, EVALUATOR]})
    state, actions = play(policy, *running(policy), exited(CHIEF), exited(W0, 1), exited(PS, 1))
    assert state.reason is None
    assert RestartTask(W0) not in actions


def test_no_task_is_restarted_while_the_attempt_stops() -> None:
    policy = make_policy()
    _, actions = play(policy, *running(policy), exited(CHIEF, 1), exited(W0, 1), NodeEmpty("a"))
    assert RestartTask(W0) not in actions
    assert actions[-1] == Finish()


class TestRoles:
    def problem(self, name: str, **counts: int) -> str | None:
        found = find_role_problem(name, counts)  # type: ignore[arg-type]  # names as in a spec
        return found[1] if found is not None else None

    def test_valid_task_types_are_accepted_for_every_strategy(self) -> None:
        assert self.problem("parameter_server", chief=1, worker=2, ps=1, evaluator=1) is None
        assert self.problem("multi_worker_mirrored", chief=1, worker=2, evaluator=1) is None
        for name in ("one_device", "mirrored", "central_storage", "tpu"):
            assert self.problem(name, worker=1) is None

    def test_a_parameter_server_spec_without_a_chief_is_an_error(self) -> None:
        assert self.problem("parameter_server", worker=2, ps=1) == (
            "parameter_server needs a chief; add `chief: 1` to the `tasks:` of a node"
        )

    def test_a_single_process_strategy_rejects_two_tasks(self) -> None:
        assert "runs one process on one node, but this spec has 2 tasks" in (self.problem("mirrored", worker=2) or "")


def test_all_workers_are_trainers_in_a_cluster_without_servers() -> None:
    policy = AttemptPolicy({"a": frozenset([W0, W1])}, frozenset([W0, W1]), start_s=1, drain_s=1, stop_grace_s=1)
    assert policy.trainers == {W0, W1}
    assert not policy.servers
    assert isinstance(new_attempt(policy, 0.0), AttemptState)


class TestAuxiliaryTasks:
    BOARD = TENSORBOARD

    def policy(self, *, keeps: bool) -> AttemptPolicy:
        tasks = frozenset([W0, W1, self.BOARD])
        return AttemptPolicy(
            {"a": tasks}, frozenset([W0, W1]), 600.0, DRAIN_S, GRACE_S, keeps_auxiliary=keeps, strategy=TORCH
        )

    def up(self, *, keeps: bool) -> tuple[AttemptPolicy, list[Event]]:
        policy = self.policy(keeps=keeps)
        return policy, [*preparing(policy), *started(W0, W1, self.BOARD), *listening(W0, W1)]

    def test_tensorboard_is_stopped_when_all_tasks_have_ended(self) -> None:
        policy, events = self.up(keeps=False)
        state, actions = play(policy, *events, exited(W0), exited(W1))
        assert (state.reason, actions[-1]) == (Reason.SUCCEEDED, FAILURE_STOP)
        assert state.stopped == {self.BOARD}

    def test_kept_tensorboard_runs_until_ctrl_c_and_the_run_still_succeeds(self) -> None:
        policy, events = self.up(keeps=True)
        state, _ = play(policy, *events, exited(W0), exited(W1))
        assert (state.reason, state.is_over) == (None, True)
        later, _ = decide(state, Tick(), 10 * DRAIN_S)
        assert (later.reason, later.deadline) == (None, None)
        ended, actions = decide(later, Interrupted(signal.SIGINT), 10 * DRAIN_S)
        assert (ended.reason, ended.signal, actions) == (Reason.SUCCEEDED, None, (StopNodes(GRACE_S, interrupts=True),))

    def test_the_exit_of_tensorboard_is_not_reported_in_the_verdict(self) -> None:
        policy, events = self.up(keeps=False)
        slow = replace(exited(self.BOARD, signal=signal.SIGKILL), finished=1009.0)  # it handled SIGTERM, but too slowly
        state, _ = play(policy, *events, exited(W0), exited(W1), slow, NodeEmpty("a"))
        verdict = judged(state)
        assert (verdict.reference, verdict.evidence) == ("succeeded", [])

    def test_kept_tensorboard_does_not_delay_a_failure(self) -> None:
        policy, events = self.up(keeps=True)
        state, _ = play(policy, *events, exited(W0, 1))
        assert state.reason is Reason.TASK_FAILED

    def test_an_early_exit_of_tensorboard_is_ignored(self) -> None:
        policy, events = self.up(keeps=True)
        state, _ = play(policy, *events, exited(self.BOARD, 1))
        assert state.reason is None
        state, _ = play(policy, *events, exited(self.BOARD, 1), exited(W0), exited(W1))
        assert state.reason is Reason.SUCCEEDED
