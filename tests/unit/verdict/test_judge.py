"""The verdict names the cause, not the task that was seen to end first, in words for users."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.gang.decide import FAILURE_GRACE_S, STOP_MARGIN_S
from launcher.gang.events import (
    Event,
    Interrupted,
    NodeEmpty,
    NodeLost,
    NodeReady,
    NodeRefused,
    StacksReceived,
    TaskExited,
    TaskHalted,
    TaskReported,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Reason
from launcher.tasks import TaskId
from launcher.verdict.causes import (
    failed_by_itself,
    find_cause,
    is_collateral,
    was_stopped,
)
from launcher.verdict.judge import outcome, render_place
from launcher.verdict.models import Verdict
from tests.harness.builders.gang import (
    DRAIN_S,
    EVALUATOR,
    ONE_NODE,
    START_S,
    TWO_NODES,
    W0,
    W1,
    W2,
    WITH_EVALUATOR,
    histories,
    listening,
    make_policy,
    play,
    preparing,
    replay,
    running,
    started,
)
from tests.harness.builders.verdicts import THREE, UNAVAILABLE, ended, failed, history, judged, status_of
from worker_entry.protocol import collateral
from worker_entry.protocol.values import CrashRecord, Problem, TaskExit

W3 = TaskId("worker", 3)


class TestCause:
    def test_is_the_earliest_raise_even_if_its_exit_is_seen_after_that_of_its_victim(self) -> None:
        state = history(ONE_NODE, failed(W0, 1050.0, raised=1049.9), failed(W1, 1050.4, raised=1049.1))

        cause = find_cause(state, {})

        assert cause is not None
        assert cause.exited.task == W1

    def test_is_a_signal_that_came_before_a_raise(self) -> None:
        state = history(ONE_NODE, failed(W0, 1051.0, raised=1050.2), ended(W1, 1050.0, by=signal.SIGSEGV))

        assert judged(state).task == "worker:1"

    @pytest.mark.parametrize("signature", collateral.SIGNATURES)
    @pytest.mark.parametrize("exception", collateral.EXCEPTIONS)
    def test_is_never_a_task_that_only_lost_its_peer_when_another_failed(self, exception: str, signature: str) -> None:
        victim = failed(W0, 1049.0, exception, f"Graph execution error:\n{signature} and so on")

        assert is_collateral(victim, {})
        assert judged(history(ONE_NODE, victim, failed(W1, 1060.0))).task == "worker:1"
        assert judged(history(ONE_NODE, victim, ended(W1, 1060.0, by=signal.SIGBUS))).task == "worker:1"

    def test_is_the_first_to_lose_its_peer_if_no_task_failed_otherwise(self) -> None:
        late, early = (
            failed(W0, 1059.0, "UnavailableError", UNAVAILABLE),
            failed(W1, 1051.0, "AbortedError", UNAVAILABLE),
        )

        assert judged(history(ONE_NODE, late, early)).task == "worker:1"

    @pytest.mark.parametrize("exception", ["RuntimeError", "InvalidArgumentError", "OSError"])
    def test_may_be_a_users_error_whose_text_resembles_a_lost_peer(self, exception: str) -> None:
        assert not is_collateral(failed(W0, 1050.0, exception, UNAVAILABLE), {})

    def test_may_be_an_error_of_tensorflow_that_names_no_peer(self) -> None:
        assert not is_collateral(failed(W0, 1050.0, "InternalError", "cuDNN launch failure"), {})

    def test_is_never_a_task_that_was_stopped(self) -> None:
        state = history(ONE_NODE, failed(W1, 1050.0), ended(W0, 1040.0, by=signal.SIGKILL))

        assert judged(state).task == "worker:1"

    def test_is_never_an_evaluator(self) -> None:
        state = history(WITH_EVALUATOR, failed(EVALUATOR, 1020.0), failed(W1, 1050.0))

        assert judged(state).task == "worker:1"

    def test_is_absent_without_a_failure(self) -> None:
        assert find_cause(history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1050.0)), {}) is None


class TestWasStopped:
    @pytest.mark.parametrize(
        "how", [TaskExit(0), TaskExit(143), TaskExit(None, signal.SIGTERM), TaskExit(None, signal.SIGKILL)]
    )
    def test_when_it_ended_as_a_stopped_task_does(self, how: TaskExit) -> None:
        event = TaskExited(W0, how, 1051.0)

        assert was_stopped(history(ONE_NODE, failed(W1, 1050.0), event), event)

    @pytest.mark.parametrize(
        "how", [TaskExit(1), TaskExit(42), TaskExit(None, signal.SIGSEGV), TaskExit(None, signal.SIGABRT)]
    )
    def test_not_when_it_ended_in_another_way(self, how: TaskExit) -> None:
        event = TaskExited(W0, how, 1051.0)

        assert not was_stopped(history(ONE_NODE, failed(W1, 1050.0), event), event)

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
    def test_when_it_had_raised_before_but_then_it_also_failed_by_itself(self, signum: int) -> None:
        event = replace(failed(W0, 1051.0), exit=TaskExit(None, signum))
        state = history(ONE_NODE, failed(W1, 1050.0), event)

        assert was_stopped(state, event)
        assert failed_by_itself(state, event)

    def test_when_python_ended_with_143_because_of_its_own_sigterm_handler(self) -> None:
        crash = CrashRecord(1050.5, "SystemExit", "sys.exit(143)", "train.py", 9, exit_status=143)
        event = TaskExited(W0, TaskExit(143), 1051.0, crash)
        state = history(ONE_NODE, failed(W1, 1050.0), event)

        assert was_stopped(state, event)
        assert not failed_by_itself(state, event)

    def test_not_when_it_ended_before_anything_was_stopped(self) -> None:
        event = ended(W0, 1040.0)

        assert not was_stopped(history(ONE_NODE, event, failed(W1, 1050.0)), event)


class TestSuccess:
    def test_of_several_tasks(self) -> None:
        verdict = judged(history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1051.0)))

        assert verdict == Verdict(reference="succeeded", message="both workers ended with status 0")

    def test_names_the_tasks_that_succeeded(self) -> None:
        three = [TaskId("worker", index) for index in range(3)]
        chief = TaskId("chief", 0)
        for tasks, name in ((three, "all 3 workers"), ([chief, W0], "the chief and 1 worker"), ([W0], "worker:0")):
            verdict = judged(history({"a": tasks}, *(ended(task, 1050.0) for task in tasks)))
            assert verdict.message == f"{name} ended with status 0"

    def test_of_one_task_with_an_evaluator_that_was_stopped(self) -> None:
        policy = make_policy({"a": [W0, EVALUATOR]})
        state, _ = play(
            policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), NodeEmpty("a")
        )

        assert judged(state) == Verdict(
            reference="succeeded",
            message="worker:0 ended with status 0",
            evidence=["evaluator:0 was still running and was stopped"],
        )

    def test_with_an_evaluator_that_failed(self) -> None:
        state = history(WITH_EVALUATOR, ended(EVALUATOR, 1020.0, 1), ended(W0, 1050.0), ended(W1, 1051.0))

        assert judged(state).evidence == ["evaluator:0 ended with exit status 1, which does not fail the run"]


class TestFailure:
    def test_names_the_task_its_end_and_the_consequences(self) -> None:
        state = history(
            THREE,
            failed(W0, 1044.0, "UnavailableError", UNAVAILABLE, raised=1042.9),
            failed(W1, 1043.0, raised=1042.0),
            ended(W2, 1044.5, by=signal.SIGKILL),
        )

        assert judged(state) == Verdict(
            reference="task-failed",
            message="worker:1 on a exited with status 1 after 42.0 s",
            task="worker:1",
            evidence=[
                "ValueError: shapes (3,4) and (5,) not aligned   train.py:88",
                "worker:0 failed 0.9 s later because of it",
                "stopped by distlaunch: worker:2",
                "log: /runs/x/attempt-1/worker-1.log",
            ],
        )

    def test_by_a_signal(self) -> None:
        state = history(ONE_NODE, TaskExited(W0, TaskExit(None, signal.SIGSEGV, core_dumped=True), 1010.25))

        verdict = judged(state)

        assert verdict.message == "worker:0 on a was killed by SIGSEGV (signal 11, core dumped) after 10.2 s"
        assert verdict.evidence == ["log: /runs/x/attempt-1/worker-0.log"]
        assert verdict.hint == ""

    def test_by_sigkill_hints_at_the_oom_killer(self) -> None:
        verdict = judged(history(ONE_NODE, ended(W0, 1010.0, by=signal.SIGKILL)))

        assert verdict.message == "worker:0 on a was killed by SIGKILL (signal 9) after 10.0 s"
        assert verdict.hint == (
            "the sender of SIGKILL is unknown; most often it is the kernel's OOM killer: see `dmesg` on that node"
        )

    def test_shows_how_other_tasks_failed_by_themselves(self) -> None:
        state = history(
            {"a": [W0, W1, W2, W3]},
            failed(W0, 1043.0),
            failed(W1, 1044.0, "KeyError", "'a'"),
            ended(W2, 1044.0, by=signal.SIGABRT),
            replace(failed(W3, 1045.5, "KeyError", "'b'"), exit=TaskExit(None, signal.SIGTERM)),
        )

        assert judged(state).evidence[1:] == [
            "worker:1 failed 1.0 s later: KeyError: 'a'   train.py:88",
            "worker:2 failed 2.0 s later with SIGABRT (signal 6)",
            "worker:3 failed 2.5 s later: KeyError: 'b'   train.py:88",
            "log: /runs/x/attempt-1/worker-0.log",
        ]

    def test_of_a_victim_with_an_earlier_time_shows_no_negative_time(self) -> None:
        state = history(ONE_NODE, failed(W0, 1043.0, "UnavailableError", UNAVAILABLE), failed(W1, 1044.0))

        assert judged(state).evidence[1] == "worker:0 failed, too"

    def test_after_an_early_end_names_the_task_that_ended_early(self) -> None:
        state = history(ONE_NODE, ended(W1, 1050.0), failed(W0, 1060.8, "UnavailableError", UNAVAILABLE, raised=1059.8))

        assert judged(state) == Verdict(
            reference="ended-early",
            message="worker:1 on a ended with status 0 after 50.0 s, before the others had finished",
            task="worker:1",
            evidence=["worker:0 failed 9.8 s later because of it", "log: /runs/x/attempt-1/worker-1.log"],
            hint="all workers must run the same number of steps: when one ends early, the others fail",
        )

    def test_by_sys_exit_shows_the_call(self) -> None:
        state = history(ONE_NODE, failed(W0, 1010.0, "SystemExit", "sys.exit(3)"))

        assert judged(state).evidence[0] == "sys.exit(3)   train.py:88"

    def test_shows_one_line_of_a_long_message(self) -> None:
        state = history(ONE_NODE, failed(W0, 1010.0, message="\n\n  first  \nsecond"))

        assert judged(state).evidence[0] == "ValueError: first   train.py:88"

    def test_shows_an_exception_without_a_message(self) -> None:
        assert judged(history(ONE_NODE, failed(W0, 1010.0, message=""))).evidence[0] == "ValueError   train.py:88"

    def test_of_many_tasks_names_a_few(self) -> None:
        workers = [TaskId("worker", index) for index in range(30)]
        state = history(
            {"a": workers},
            failed(W0, 1010.0),
            *(failed(task, 1011.0, "AbortedError", UNAVAILABLE) for task in workers[1:12]),
            *(ended(task, 1012.0, by=signal.SIGKILL) for task in workers[12:]),
        )

        evidence = judged(state).evidence

        assert evidence[8:] == [
            "worker:8 failed 1.0 s later because of it",
            "3 more tasks failed later",
            (
                "stopped by distlaunch: worker:12, worker:13, worker:14, worker:15, worker:16, worker:17, worker:18, "
                "worker:19 and 10 more"
            ),
            "log: /runs/x/attempt-1/worker-0.log",
        ]

    @pytest.mark.parametrize(
        ("module", "hint"),
        [
            (
                "tensorflow",
                "install TensorFlow for this Python, or name the one that has it with --python (`python:` in a spec)",
            ),
            ("pandas", "install the module for the Python that the tasks use, or set PYTHONPATH"),
        ],
    )
    def test_of_an_import_says_how_to_get_the_module(self, module: str, hint: str) -> None:
        crash = failed(W0, 1010.0, "ModuleNotFoundError", f"No module named '{module}'")

        assert judged(history(ONE_NODE, crash)).hint == hint


class TestRefusal:
    def refused(self, *refusals: NodeRefused) -> AttemptState:
        return play(make_policy(TWO_NODES), NodeReady("a"), NodeReady("b"), *refusals)[0]

    def test_of_all_for_one_reason_says_it_once(self) -> None:
        problem = Problem(
            "no-program", "cannot read the script /home/alice/x.py: No such file or directory", "name another"
        )

        verdict = judged(
            self.refused(*(NodeRefused(node, (replace(problem, task=f"worker:{i}"),)) for i, node in enumerate("ab")))
        )

        assert verdict.message == "cannot read the script /home/alice/x.py: No such file or directory"
        assert (verdict.reference, verdict.evidence, verdict.hint) == ("no-program", [], "name another")

    def test_of_one_task_names_it_and_its_node(self) -> None:
        problem = Problem(
            "port-taken", "port 20000 is held by nginx (pid 7)", "stop it or choose another port", "worker:0"
        )

        assert judged(self.refused(NodeRefused("a", (problem,)))) == Verdict(
            reference="port-taken",
            message="worker:0 on a: port 20000 is held by nginx (pid 7)",
            task="worker:0",
            hint="stop it or choose another port",
        )

    @pytest.mark.parametrize(
        ("node", "message", "place"),
        [("local", "gone", "worker:0: "), ("a", "on a: gone", "worker:0: "), ("a", "gone", "worker:0 on a: ")],
    )
    def test_of_a_task_names_the_node_once_and_never_this_machine(self, node: str, message: str, place: str) -> None:
        assert render_place(node, Problem("no-program", message, task="worker:0")) == place

    def test_for_several_reasons_shows_all(self) -> None:
        problems = (
            Problem("no-program", "there is no program /x", task="worker:0"),
            Problem("port-taken", "port 1 is held"),
        )

        verdict = judged(self.refused(NodeRefused("a", problems[:1]), NodeRefused("b", problems[1:])))

        assert verdict.message == "worker:0 on a: there is no program /x"
        assert verdict.evidence == ["b: port 1 is held [port-taken]"]

    def test_without_a_reason_names_the_node(self) -> None:
        assert (
            judged(self.refused(NodeRefused("b", ()))).message == "node b refused to start its tasks and gave no reason"
        )


class TestLoss:
    def test_names_node_tasks_and_the_agents_last_output(self) -> None:
        state = history(TWO_NODES, NodeLost("b", "the agent ended"))

        assert judged(state, ["MemoryError"]) == Verdict(
            reference="node-lost",
            message="node b was lost: the agent ended",
            evidence=["its tasks: worker:1", "MemoryError"],
        )

    def test_begins_with_the_node_that_was_lost_first(self) -> None:
        state = history(TWO_NODES, NodeLost("b", "the agent ended"), NodeLost("a", "no data for 60 s"))

        verdict = judged(state)

        assert verdict.message == "node b was lost: the agent ended"
        assert verdict.evidence[1:] == ["node a was lost: no data for 60 s"]

    def test_before_any_answer_means_that_the_node_cannot_be_used(self) -> None:
        policy = make_policy(TWO_NODES)
        state, _ = play(
            policy, NodeLost("b", "connection refused: b:22"), NodeLost("a", "the host key of a has changed")
        )

        assert judged(state) == Verdict(
            reference="node-unreachable",
            message="node a cannot be used: the host key of a has changed",
            evidence=["node b cannot be used: connection refused: b:22"],  # in the order of the spec
        )

    def test_while_stopping_is_reported_beside_the_cause(self) -> None:
        policy = make_policy(TWO_NODES)
        state, _ = play(policy, *running(policy), failed(W0, 1010.0), FAILURE_GRACE_S + STOP_MARGIN_S, Tick())

        verdict = judged(state)

        assert verdict.reference == "task-failed"
        assert "node b was lost: did not report that all of its processes have ended" in verdict.evidence


class TestStartTimeout:
    HINT = (
        "a program opens its port when it creates MultiWorkerMirroredStrategy; increase timeouts.start_s "
        "if it needs longer; 0 disables the timeout"
    )

    def timed_out(self, layout: dict[str, list[TaskId]], *events: Event) -> AttemptState:
        policy = make_policy(layout)
        ends = [ended(task, 1700.0, by=signal.SIGTERM) for task in policy.tasks]
        state, _ = play(
            policy,
            *preparing(policy),
            *events,
            START_S,
            Tick(),
            StacksReceived({}),
            *ends,
            *map(NodeEmpty, policy.nodes),
        )
        assert state.reason is Reason.START_TIMEOUT
        return state

    def test_names_the_only_task_that_is_missing(self) -> None:
        state = self.timed_out(TWO_NODES, *started(W0, W1), *listening(W0))

        assert judged(state) == Verdict(
            reference="start-timeout",
            message="no cluster within 600 s: waiting for worker:1 on b (port 20001 not open); worker:0 is ready",
            task="worker:1",
            hint=self.HINT,
        )

    def test_names_all_that_are_missing(self) -> None:
        verdict = judged(self.timed_out(TWO_NODES, *started(W0, W1)))

        waiting = "waiting for worker:0 on a (port 20000 not open), worker:1 on b (port 20001 not open)"
        assert verdict.message == f"no cluster within 600 s: {waiting}"
        assert (verdict.task, verdict.evidence) == (None, [])

    def test_names_a_few_of_many(self) -> None:
        workers = [TaskId("worker", index) for index in range(30)]

        verdict = judged(self.timed_out({"a": workers}, *started(*workers), *listening(W0)))

        assert verdict.message.endswith("worker:4 on a (port 20004 not open) and 25 more; worker:0 is ready")

    def test_shows_how_far_each_task_has_come(self) -> None:
        importing = TaskReported(W0, "is importing TensorFlow", 1660.0)
        state = self.timed_out(TWO_NODES, *started(W0, W1), importing, TaskHalted(W1, signal.SIGSTOP, 1650.0))

        assert judged(state).message == (
            "no cluster within 600 s: waiting for worker:0 on a (port 20000 not open, is importing TensorFlow, 40 s), "
            "worker:1 on b (port 20001 not open, stopped by a signal)"
        )

    def test_names_the_tasks_that_were_never_started(self) -> None:
        policy = make_policy({"a": [W0, W2], "b": [W1, EVALUATOR]})

        state, _ = play(
            policy, *preparing(policy), *started(W0, W2), *listening(W0), START_S, Tick(), StacksReceived({})
        )

        assert judged(state).message == "no cluster within 600 s: not started: evaluator:0, worker:1"

    def test_names_the_nodes_that_do_not_answer(self) -> None:
        state, _ = play(make_policy(TWO_NODES), NodeReady("a"), START_S, Tick())

        assert judged(state).message == "no answer from b within 600 s"


def test_a_drain_timeout_names_the_running_tasks_and_the_ended_ones() -> None:
    policy = make_policy(THREE)
    killed = [ended(task, 1400.0, by=signal.SIGKILL) for task in (W1, W2)]
    state, _ = play(
        policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), *killed, NodeEmpty("a")
    )

    assert judged(state) == Verdict(
        reference="drain-timeout",
        message="worker:1, worker:2 did not end within 300 s after the first task ended, and are not at work",
        evidence=["ended with status 0: worker:0"],
        hint="increase timeouts.drain_s if the others need longer; 0 disables the timeout",
    )


def test_an_interruption_by_distlaunch_down_says_so() -> None:
    state = history(ONE_NODE, Interrupted(signal.SIGTERM, asked=True))
    assert judged(state) == Verdict(reference="interrupted", message="stopped by `distlaunch down`")


def test_nodes_that_refuse_are_named_in_the_order_of_the_spec() -> None:
    refusals = [NodeRefused(node, (Problem("no-program", f"no train.py on {node}"),)) for node in ("b", "a")]
    state, _ = play(make_policy(TWO_NODES), NodeReady("a"), NodeReady("b"), *refusals)
    verdict = judged(state)
    assert (verdict.message, verdict.evidence) == ("no train.py on a", ["no train.py on b [no-program]"])


@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (signal.SIGINT, "interrupted by SIGINT (signal 2); all tasks were stopped"),
        (signal.SIGTERM, "interrupted by SIGTERM (signal 15); all tasks were stopped"),
        (signal.SIGHUP, "interrupted by SIGHUP (signal 1); all tasks were stopped"),
        (signal.SIGPIPE, "the reader of the output is gone (SIGPIPE); all tasks were stopped"),
    ],
)
def test_an_interruption_names_the_signal(signum: int, message: str) -> None:
    assert judged(history(ONE_NODE, Interrupted(signum))) == Verdict(reference="interrupted", message=message)


class TestExitStatus:
    @pytest.mark.parametrize(
        ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGPIPE, 141)]
    )
    def test_of_an_interrupted_run_names_the_signal(self, signum: int, status: int) -> None:
        state = history(ONE_NODE, Interrupted(signum))

        assert (status_of(state), outcome(state)) == (status, "interrupted")

    def test_of_success_is_0(self) -> None:
        state = history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1051.0))

        assert (status_of(state), outcome(state)) == (0, "succeeded")

    @pytest.mark.parametrize("how", [TaskExit(1), TaskExit(77), TaskExit(None, signal.SIGKILL)])
    def test_of_a_failed_task_is_1_whatever_its_own_status_was(self, how: TaskExit) -> None:
        state = history(ONE_NODE, TaskExited(W0, how, 1050.0))

        assert (status_of(state), outcome(state)) == (EXIT_TASK_FAILED, "failed")

    def test_of_a_failed_task_stays_1_if_the_user_interrupts_the_stop(self) -> None:
        state = history(ONE_NODE, failed(W0, 1050.0), Interrupted(signal.SIGINT))

        assert (status_of(state), outcome(state)) == (EXIT_TASK_FAILED, "failed")

    @pytest.mark.parametrize(
        ("reference", "status"),
        [
            ("no-program", EXIT_USAGE),
            ("no-working-directory", EXIT_USAGE),
            ("syntax-error", EXIT_USAGE),
            ("not-executable", EXIT_USAGE),
            ("no-tensorflow", EXIT_USAGE),
            ("port-taken", EXIT_INFRASTRUCTURE),
            ("run-directory", EXIT_INFRASTRUCTURE),
        ],
    )
    def test_of_a_refusal_separates_usage_errors_from_infrastructure_errors(self, reference: str, status: int) -> None:
        refusal = NodeRefused("a", (Problem(reference, "it is so"),))

        state, _ = play(make_policy(ONE_NODE), NodeReady("a"), refusal, NodeEmpty("a"))

        assert (status_of(state), outcome(state)) == (status, "failed")

    def test_of_a_refusal_for_both_kinds_of_errors_is_3(self) -> None:
        problems = (Problem("no-program", "there is none"), Problem("port-taken", "it is"))

        state, _ = play(make_policy(ONE_NODE), NodeReady("a"), NodeRefused("a", problems), NodeEmpty("a"))

        assert status_of(state) == EXIT_INFRASTRUCTURE

    def test_of_a_refusal_once_tasks_ran_is_3(self) -> None:
        assert status_of(history(ONE_NODE, NodeRefused("a", (Problem("no-program", "gone"),)))) == EXIT_INFRASTRUCTURE

    def test_of_a_lost_node_is_3(self) -> None:
        assert status_of(history(TWO_NODES, NodeLost("b", "the agent ended"))) == EXIT_INFRASTRUCTURE

    def test_of_timeouts_is_3(self) -> None:
        policy = make_policy(ONE_NODE)

        assert status_of(play(policy, START_S, Tick(), NodeEmpty("a"))[0]) == EXIT_INFRASTRUCTURE
        drained, _ = play(
            policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), NodeEmpty("a")
        )
        assert status_of(drained) == EXIT_INFRASTRUCTURE


@given(histories())
def test_every_end_has_a_verdict(told: tuple[AttemptPolicy, list[tuple[float, Event]]]) -> None:
    steps = replay(*told)
    if steps and steps[-1][2].reason is not None:
        state = steps[-1][2]

        verdict = judged(state)

        assert verdict.message
        assert "  " not in verdict.message
        assert (verdict.reference == "succeeded") == (status_of(state) == 0)


def test_a_lost_node_is_the_cause_if_a_task_only_misses_a_peer() -> None:
    policy = make_policy(TWO_NODES)
    missed = CrashRecord(1050.0, "UnavailableError", "Collective ops is aborted by: Socket closed")

    state, _ = play(
        policy,
        *running(policy),
        TaskExited(W0, TaskExit(code=1), 1050.5, missed),
        NodeEmpty("a"),
        NodeLost("b", "no data for 10 s, and not reconnected within 60 s"),
    )

    verdict = judged(state)
    assert verdict.reference == "node-lost"
    assert verdict.message == "node b was lost: no data for 10 s, and not reconnected within 60 s"
    assert status_of(state) == 3
