"""The verdict names the cause in the user's terms, and not the task that was seen to end first."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.gang.checks.findings import SEND_FOLDER
from launcher.gang.decide import FAILURE_GRACE_S, STOP_MARGIN_S
from launcher.gang.events import (
    Event,
    Interrupted,
    NodeEmpty,
    NodeLost,
    NodeReady,
    NodeRefused,
    ProgramEnded,
    StacksReceived,
    TaskExited,
    TaskHalted,
    TaskReported,
    TaskStarted,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Reason
from launcher.spec.strategies import RULES
from launcher.tasks import TaskId
from launcher.verdict.causes import (
    failed_by_itself,
    find_cause,
    is_collateral,
    was_stopped,
)
from launcher.verdict.judge import find_hint, outcome, render_place
from launcher.verdict.models import Verdict
from launcher.verdict.stall_blame import render_steps
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
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import CrashRecord, Problem, Progress, TaskExit

W3 = TaskId("worker", 3)


class TestCause:
    def test_the_cause_is_the_earliest_exception_even_if_its_exit_is_seen_later(self) -> None:
        state = history(ONE_NODE, failed(W0, 1050.0, raised=1049.9), failed(W1, 1050.4, raised=1049.1))

        cause = find_cause(state, {})

        assert cause is not None
        assert cause.exited.task == W1

    def test_the_cause_is_a_signal_that_preceded_an_exception(self) -> None:
        state = history(ONE_NODE, failed(W0, 1051.0, raised=1050.2), ended(W1, 1050.0, by=signal.SIGSEGV))

        assert judged(state).task == "worker:1"

    @pytest.mark.parametrize("signature", collateral.SIGNATURES)
    @pytest.mark.parametrize("exception", collateral.EXCEPTIONS)
    def test_a_task_that_only_lost_its_peer_is_never_the_cause(self, exception: str, signature: str) -> None:
        victim = failed(W0, 1049.0, exception, f"Graph execution error:\n{signature} and so on")

        assert is_collateral(victim, {})
        assert judged(history(ONE_NODE, victim, failed(W1, 1060.0))).task == "worker:1"
        assert judged(history(ONE_NODE, victim, ended(W1, 1060.0, by=signal.SIGBUS))).task == "worker:1"

    def test_the_cause_is_the_first_lost_peer_error_if_no_task_failed_otherwise(self) -> None:
        late, early = (
            failed(W0, 1059.0, "UnavailableError", UNAVAILABLE),
            failed(W1, 1051.0, "AbortedError", UNAVAILABLE),
        )

        assert judged(history(ONE_NODE, late, early)).task == "worker:1"

    @pytest.mark.parametrize("exception", ["RuntimeError", "InvalidArgumentError", "OSError"])
    def test_a_user_error_that_resembles_a_lost_peer_can_be_the_cause(self, exception: str) -> None:
        assert not is_collateral(failed(W0, 1050.0, exception, UNAVAILABLE), {})

    def test_a_tensorflow_error_that_names_no_peer_can_be_the_cause(self) -> None:
        assert not is_collateral(failed(W0, 1050.0, "InternalError", "cuDNN launch failure"), {})

    def test_a_stopped_task_is_never_the_cause(self) -> None:
        state = history(ONE_NODE, failed(W1, 1050.0), ended(W0, 1040.0, by=signal.SIGKILL))

        assert judged(state).task == "worker:1"

    def test_an_evaluator_is_never_the_cause(self) -> None:
        state = history(WITH_EVALUATOR, failed(EVALUATOR, 1020.0), failed(W1, 1050.0))

        assert judged(state).task == "worker:1"

    def test_a_successful_attempt_has_no_cause(self) -> None:
        assert find_cause(history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1050.0)), {}) is None


class TestWasStopped:
    @pytest.mark.parametrize(
        "how", [TaskExit(0), TaskExit(143), TaskExit(None, signal.SIGTERM), TaskExit(None, signal.SIGKILL)]
    )
    def test_a_task_with_the_exit_of_a_stopped_task_counts_as_stopped(self, how: TaskExit) -> None:
        event = TaskExited(W0, how, 1051.0)

        assert was_stopped(history(ONE_NODE, failed(W1, 1050.0), event), event)

    @pytest.mark.parametrize(
        "how", [TaskExit(1), TaskExit(42), TaskExit(None, signal.SIGSEGV), TaskExit(None, signal.SIGABRT)]
    )
    def test_a_task_with_any_other_exit_does_not_count_as_stopped(self, how: TaskExit) -> None:
        event = TaskExited(W0, how, 1051.0)

        assert not was_stopped(history(ONE_NODE, failed(W1, 1050.0), event), event)

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
    def test_a_task_that_raised_before_it_was_stopped_also_failed_by_itself(self, signum: int) -> None:
        event = replace(failed(W0, 1051.0), exit=TaskExit(None, signum))
        state = history(ONE_NODE, failed(W1, 1050.0), event)

        assert was_stopped(state, event)
        assert failed_by_itself(state, event)

    def test_a_task_that_handled_sigterm_with_exit_143_counts_as_stopped(self) -> None:
        crash = CrashRecord(1050.5, "SystemExit", "sys.exit(143)", "train.py", 9, exit_status=143)
        event = TaskExited(W0, TaskExit(143), 1051.0, crash)
        state = history(ONE_NODE, failed(W1, 1050.0), event)

        assert was_stopped(state, event)
        assert not failed_by_itself(state, event)

    def test_a_task_that_ended_before_the_stop_does_not_count_as_stopped(self) -> None:
        event = ended(W0, 1040.0)

        assert not was_stopped(history(ONE_NODE, event, failed(W1, 1050.0)), event)


class TestSuccess:
    def test_the_verdict_of_success_names_both_workers(self) -> None:
        verdict = judged(history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1051.0)))

        assert verdict == Verdict(reference="succeeded", message="both workers ended with status 0")

    def test_the_verdict_of_success_counts_the_tasks_by_type(self) -> None:
        three = [TaskId("worker", index) for index in range(3)]
        chief = TaskId("chief", 0)
        for tasks, name in ((three, "all 3 workers"), ([chief, W0], "the chief and 1 worker"), ([W0], "worker:0")):
            verdict = judged(history({"a": tasks}, *(ended(task, 1050.0) for task in tasks)))
            assert verdict.message == f"{name} ended with status 0"

    def test_the_verdict_of_success_mentions_a_stopped_evaluator(self) -> None:
        policy = make_policy({"a": [W0, EVALUATOR]})
        state, _ = play(
            policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), NodeEmpty("a")
        )

        assert judged(state) == Verdict(
            reference="succeeded",
            message="worker:0 ended with status 0",
            evidence=["evaluator:0 was still running and was stopped"],
        )

    def test_the_verdict_of_success_mentions_a_failed_evaluator(self) -> None:
        state = history(WITH_EVALUATOR, ended(EVALUATOR, 1020.0, 1), ended(W0, 1050.0), ended(W1, 1051.0))

        assert judged(state).evidence == ["evaluator:0 ended with exit status 1, which does not fail the run"]
        state = history(WITH_EVALUATOR, ended(EVALUATOR, 1020.0), ended(W0, 1050.0), ended(W1, 1051.0))
        assert judged(state).evidence == []

    def test_the_verdict_of_success_distinguishes_a_finished_program_from_an_ended_process(self) -> None:
        late = replace(ended(W1, 1060.0, by=signal.SIGKILL), finished=1050.0)
        state = history(TWO_NODES, ended(W0, 1050.0), ProgramEnded(W1, 1050.0), late)
        killed = "interpreter ended with SIGKILL (signal 9)"
        assert judged(state) == Verdict(
            reference="succeeded",
            message="both workers finished",
            evidence=[f"worker:1 finished its program before its {killed}; this does not fail the run"],
        )
        state = history(TWO_NODES, ProgramEnded(W1, 1050.0), NodeLost("b", "gone"), ended(W0, 1050.0))
        assert judged(state).message == "both workers finished"

    def test_the_verdict_of_success_names_tasks_that_trained_separately_or_restarted_alone(self) -> None:
        built = [TaskReported(task, "trains", 1010.0, strategy="MirroredStrategy") for task in (W0, W1)]
        policy = make_policy(TWO_NODES)
        state, _ = play(policy, *preparing(policy), *started(W0, W1), *built, ended(W0, 1050.0), ended(W1, 1050.0))
        assert judged(state).evidence == ["worker:0, worker:1 trained separately"]
        chief, ps = TaskId("chief", 0), TaskId("ps", 0)
        served = replace(
            make_policy({"a": [chief, W0, ps]}), strategy=RULES["parameter_server"], max_individual_restarts=3
        )
        again = [
            event
            for start in (1, 2)
            for event in (replace(failed(W0, 1020.0), start=start), TaskStarted(W0, 7, 1021.0, start + 1))
        ]
        ends = [ended(chief, 1050.0), ended(W0, 1051.0, by=signal.SIGTERM), ended(ps, 1051.0, by=signal.SIGTERM)]
        state, _ = play(served, *running(served), *again, *ends, NodeEmpty("a"))
        assert judged(state) == Verdict(
            reference="succeeded",
            message="chief:0 ended with status 0",
            evidence=["worker:0 was restarted individually, after exit status 1, exit status 1"],
        )


class TestFailure:
    def test_the_verdict_of_a_failure_names_task_exit_and_consequences(self) -> None:
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

    def test_the_verdict_of_a_killed_task_names_the_signal(self) -> None:
        state = history(ONE_NODE, TaskExited(W0, TaskExit(None, signal.SIGSEGV, core_dumped=True), 1010.25))

        verdict = judged(state)

        assert verdict.message == "worker:0 on a was killed by SIGSEGV (signal 11, core dumped) after 10.2 s"
        assert verdict.evidence == ["log: /runs/x/attempt-1/worker-0.log"]
        assert verdict.hint == ""

    def test_the_verdict_of_sigkill_hints_at_the_oom_killer(self) -> None:
        verdict = judged(history(ONE_NODE, ended(W0, 1010.0, by=signal.SIGKILL)))

        assert verdict.message == "worker:0 on a was killed by SIGKILL (signal 9) after 10.0 s"
        assert verdict.hint == (
            "the sender of SIGKILL is unknown; most often it is the kernel's OOM killer: see `dmesg` on that node"
        )

    def test_the_verdict_shows_other_tasks_that_failed_by_themselves(self) -> None:
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

    def test_the_verdict_shows_no_negative_time_for_an_earlier_peer_failure(self) -> None:
        state = history(ONE_NODE, failed(W0, 1043.0, "UnavailableError", UNAVAILABLE), failed(W1, 1044.0))

        assert judged(state).evidence[1] == "worker:0 failed, too"

    def test_the_verdict_names_the_task_that_ended_early(self) -> None:
        state = history(ONE_NODE, ended(W1, 1050.0), failed(W0, 1060.8, "UnavailableError", UNAVAILABLE, raised=1059.8))

        assert judged(state) == Verdict(
            reference="ended-early",
            message="worker:1 on a ended with status 0 after 50.0 s, before the others had finished",
            task="worker:1",
            evidence=["worker:0 failed 9.8 s later because of it", "log: /runs/x/attempt-1/worker-1.log"],
            hint="all workers must run the same number of steps: when one ends early, the others fail",
        )

    def test_the_verdict_shows_a_sys_exit_call(self) -> None:
        state = history(ONE_NODE, failed(W0, 1010.0, "SystemExit", "sys.exit(3)"))

        assert judged(state).evidence[0] == "sys.exit(3)   train.py:88"

    def test_the_verdict_shows_one_line_of_a_long_exception_message(self) -> None:
        state = history(ONE_NODE, failed(W0, 1010.0, message="\n\n  first  \nsecond"))

        assert judged(state).evidence[0] == "ValueError: first   train.py:88"

    def test_the_verdict_shows_an_exception_without_a_message(self) -> None:
        assert judged(history(ONE_NODE, failed(W0, 1010.0, message=""))).evidence[0] == "ValueError   train.py:88"

    def test_the_verdict_of_many_failed_tasks_lists_only_a_few(self) -> None:
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
    def test_the_verdict_of_a_missing_module_has_an_install_hint(self, module: str, hint: str) -> None:
        crash = failed(W0, 1010.0, "ModuleNotFoundError", f"No module named '{module}'")

        assert judged(history(ONE_NODE, crash)).hint == hint


class TestRefusal:
    def refused(self, *refusals: NodeRefused) -> AttemptState:
        return play(make_policy(TWO_NODES), NodeReady("a"), NodeReady("b"), *refusals)[0]

    def test_a_refusal_by_all_nodes_for_one_reason_is_reported_once(self) -> None:
        problem = Problem(
            "no-program", "cannot read the script /home/alice/x.py: No such file or directory", "name another"
        )

        verdict = judged(
            self.refused(*(NodeRefused(node, (replace(problem, task=f"worker:{i}"),)) for i, node in enumerate("ab")))
        )

        assert verdict.message == "cannot read the script /home/alice/x.py: No such file or directory"
        assert (verdict.reference, verdict.evidence, verdict.hint) == ("no-program", [], "name another")

    @pytest.mark.parametrize(
        ("reference", "hint", "nodes", "is_sent", "shown"),
        [
            ("no-tensorflow", "run: pip install x", ["a", "b", "a"], False, "on a, b, run: pip install x"),
            ("no-tensorflow", "run: pip install x", ["local"], False, "run: pip install x"),
            ("no-working-directory", "", ["a"], False, SEND_FOLDER),
            ("no-program", "", ["a", "b"], False, SEND_FOLDER),
            ("no-program", "name another", ["a"], False, "name another"),
            ("no-program", "", ["a"], True, ""),
            ("no-program", "", ["local"], False, ""),
            ("port-taken", "", ["a"], False, ""),
        ],
    )
    def test_the_hint_of_a_refusal_says_where_to_run_a_command_and_that_a_folder_can_be_sent(
        self, reference: str, hint: str, nodes: list[str], is_sent: bool, shown: str
    ) -> None:
        assert find_hint(Problem(reference, "it is", hint), nodes, is_sent=is_sent) == shown

    def test_a_refusal_of_one_task_names_the_task_and_the_node(self) -> None:
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
    def test_a_refusal_names_the_node_once_and_never_the_local_machine(
        self, node: str, message: str, place: str
    ) -> None:
        assert render_place(node, Problem("no-program", message, task="worker:0")) == place

    def test_a_refusal_for_several_reasons_shows_all_reasons(self) -> None:
        problems = (
            Problem("no-program", "there is no program /x", task="worker:0"),
            Problem("port-taken", "port 1 is held"),
        )

        verdict = judged(self.refused(NodeRefused("a", problems[:1]), NodeRefused("b", problems[1:])))

        assert verdict.message == "worker:0 on a: there is no program /x"
        assert verdict.evidence == ["b: port 1 is held [port-taken]"]

    def test_a_refusal_without_a_reason_names_the_node(self) -> None:
        assert (
            judged(self.refused(NodeRefused("b", ()))).message == "node b refused to start its tasks and gave no reason"
        )


class TestLoss:
    def test_the_verdict_of_a_lost_node_shows_its_tasks_and_agent_output(self) -> None:
        state = history(TWO_NODES, NodeLost("b", "the agent ended"))

        assert judged(state, ["MemoryError"]) == Verdict(
            reference="node-lost",
            message="node b was lost: the agent ended",
            evidence=["its tasks: worker:1", "MemoryError"],
        )

    def test_the_verdict_of_several_lost_nodes_starts_with_the_first(self) -> None:
        state = history(TWO_NODES, NodeLost("b", "the agent ended"), NodeLost("a", "no data for 60 s"))

        verdict = judged(state)

        assert verdict.message == "node b was lost: the agent ended"
        assert verdict.evidence[1:] == ["node a was lost: no data for 60 s"]

    def test_a_node_lost_before_any_answer_is_reported_as_unreachable(self) -> None:
        policy = make_policy(TWO_NODES)
        state, _ = play(
            policy, NodeLost("b", "connection refused: b:22"), NodeLost("a", "the host key of a has changed")
        )

        assert judged(state) == Verdict(
            reference="node-unreachable",
            message="node a cannot be used: the host key of a has changed",
            evidence=["node b cannot be used: connection refused: b:22"],  # in the order of the spec
        )

    def test_a_node_lost_while_stopping_is_reported_in_addition_to_the_cause(self) -> None:
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

    def test_the_verdict_of_a_start_timeout_names_the_only_missing_task(self) -> None:
        state = self.timed_out(TWO_NODES, *started(W0, W1), *listening(W0))

        assert judged(state) == Verdict(
            reference="start-timeout",
            message="no cluster within 600 s: waiting for worker:1 on b (port 20001 not open); worker:0 is ready",
            task="worker:1",
            hint=self.HINT,
        )

    def test_the_verdict_of_a_start_timeout_names_all_missing_tasks(self) -> None:
        verdict = judged(self.timed_out(TWO_NODES, *started(W0, W1)))

        waiting = "waiting for worker:0 on a (port 20000 not open), worker:1 on b (port 20001 not open)"
        assert verdict.message == f"no cluster within 600 s: {waiting}"
        assert (verdict.task, verdict.evidence) == (None, [])

    def test_the_verdict_of_a_start_timeout_names_only_a_few_of_many_tasks(self) -> None:
        workers = [TaskId("worker", index) for index in range(30)]

        verdict = judged(self.timed_out({"a": workers}, *started(*workers), *listening(W0)))

        assert verdict.message.endswith("worker:4 on a (port 20004 not open) and 25 more; worker:0 is ready")

    def test_the_verdict_of_a_start_timeout_shows_the_state_of_each_task(self) -> None:
        importing = TaskReported(W0, "is importing TensorFlow", 1660.0)
        state = self.timed_out(TWO_NODES, *started(W0, W1), importing, TaskHalted(W1, signal.SIGSTOP, 1650.0))

        assert judged(state).message == (
            "no cluster within 600 s: waiting for worker:0 on a (port 20000 not open, is importing TensorFlow, 40 s), "
            "worker:1 on b (port 20001 not open, stopped by a signal)"
        )

    def test_the_verdict_of_a_start_timeout_names_tasks_never_started(self) -> None:
        policy = make_policy({"a": [W0, W2], "b": [W1, EVALUATOR]})

        state, _ = play(
            policy, *preparing(policy), *started(W0, W2), *listening(W0), START_S, Tick(), StacksReceived({})
        )

        assert judged(state).message == "no cluster within 600 s: not started: evaluator:0, worker:1"

    def test_the_verdict_of_a_start_timeout_names_nodes_that_do_not_answer(self) -> None:
        state, _ = play(make_policy(TWO_NODES), NodeReady("a"), START_S, Tick())

        assert judged(state).message == "no answer from b within 600 s"


def test_the_verdict_of_a_drain_timeout_names_running_and_ended_tasks() -> None:
    policy = make_policy(THREE)
    killed = [ended(task, 1400.0, by=signal.SIGKILL) for task in (W1, W2)]
    state, _ = play(
        policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), *killed, NodeEmpty("a")
    )

    assert judged(state) == Verdict(
        reference="drain-timeout",
        message="worker:1, worker:2 did not end within 300 s after worker:0, the first task, ended, and are "
        "not at work",
        task="worker:0",
        evidence=["ended with status 0: worker:0"],
        hint="increase timeouts.drain_s if the others need longer; 0 disables the timeout",
    )


def test_the_verdict_of_a_drain_timeout_blames_the_only_running_task() -> None:
    policy = make_policy(TWO_NODES)
    killed = (ended(W1, 1400.0, by=signal.SIGKILL), NodeEmpty("a"), NodeEmpty("b"))
    state, _ = play(policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), *killed)
    verdict = judged(state)
    assert verdict.task == "worker:1"
    assert verdict.message == "worker:1 did not end within 300 s after the first task ended, and is not at work"


def test_the_verdict_of_a_time_out_shows_the_exception_that_has_ended_a_thread_of_a_stopped_task() -> None:
    lost = CrashRecord(1050.0, "OSError", "image 7 is cut off", "load.py", 3, "loader")
    killed = TaskExited(W1, TaskExit(None, signal.SIGKILL), 1400.0, lost)
    policy = make_policy(TWO_NODES)
    state, _ = play(policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), killed)
    assert judged(state).evidence[-1] == "worker:1: OSError: image 7 is cut off (in the thread loader)   load.py:3"


def test_the_verdict_of_a_stall_names_the_usual_time_of_a_step_and_the_last_steps() -> None:
    policy = make_policy(THREE)

    def trained(task: TaskId, step: int, began: float) -> TaskReported:
        return TaskReported(task, "trains", 1000.0, Progress(step, 1, 1, began, 1099.0, p99_s=1.0))

    done = [trained(W0, 1500, 100.0), trained(W1, 1499, 100.0), trained(W2, 1501, 100.0)]
    state, _ = play(policy, *running(policy), *done, 490.0, Tick(), 500.0, Tick(), 504.0, Tick(), 514.0, Tick())
    assert (state.reason, round(state.stalled_s)) == (Reason.STALLED, 504)
    assert judged(state).message.startswith("no step for 504 s (a step usually takes 0.67 s)")
    assert judged(state).evidence == ["steps done: 1,499 by worker:1, 1,501 by worker:2, 1,500 by the others"]
    assert render_steps(play(policy, *running(policy), *done[:1])[0]) == ""


def test_the_verdict_of_distlaunch_down_names_the_command() -> None:
    state = history(ONE_NODE, Interrupted(signal.SIGTERM, asked=True))
    assert judged(state) == Verdict(reference="interrupted", message="stopped by `distlaunch down`")


def test_refusals_of_nodes_are_listed_in_spec_order() -> None:
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
def test_the_verdict_of_an_interruption_names_the_signal(signum: int, message: str) -> None:
    assert judged(history(ONE_NODE, Interrupted(signum))) == Verdict(reference="interrupted", message=message)


class TestExitStatus:
    @pytest.mark.parametrize(
        ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGPIPE, 141)]
    )
    def test_the_exit_status_of_an_interrupted_run_is_128_plus_the_signal(self, signum: int, status: int) -> None:
        state = history(ONE_NODE, Interrupted(signum))

        assert (status_of(state), outcome(state)) == (status, "interrupted")

    def test_the_exit_status_of_success_is_0(self) -> None:
        state = history(ONE_NODE, ended(W0, 1050.0), ended(W1, 1051.0))

        assert (status_of(state), outcome(state)) == (0, "succeeded")

    @pytest.mark.parametrize("how", [TaskExit(1), TaskExit(77), TaskExit(None, signal.SIGKILL)])
    def test_the_exit_status_after_any_task_failure_is_1(self, how: TaskExit) -> None:
        state = history(ONE_NODE, TaskExited(W0, how, 1050.0))

        assert (status_of(state), outcome(state)) == (EXIT_TASK_FAILED, "failed")

    def test_the_exit_status_of_a_failure_stays_1_after_an_interruption(self) -> None:
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
            ("no-jax", EXIT_USAGE),
            ("port-taken", EXIT_INFRASTRUCTURE),
            ("run-directory", EXIT_INFRASTRUCTURE),
        ],
    )
    def test_a_refusal_has_exit_status_2_for_usage_errors_and_3_otherwise(self, reference: str, status: int) -> None:
        refusal = NodeRefused("a", (Problem(reference, "it is so"),))

        state, _ = play(make_policy(ONE_NODE), NodeReady("a"), refusal, NodeEmpty("a"))

        assert (status_of(state), outcome(state)) == (status, "failed")

    def test_the_exit_status_of_a_refusal_for_mixed_reasons_is_3(self) -> None:
        problems = (Problem("no-program", "there is none"), Problem("port-taken", "it is"))

        state, _ = play(make_policy(ONE_NODE), NodeReady("a"), NodeRefused("a", problems), NodeEmpty("a"))

        assert status_of(state) == EXIT_INFRASTRUCTURE

    def test_the_exit_status_of_a_refusal_after_tasks_ran_is_3(self) -> None:
        assert status_of(history(ONE_NODE, NodeRefused("a", (Problem("no-program", "gone"),)))) == EXIT_INFRASTRUCTURE

    def test_the_exit_status_of_a_lost_node_is_3(self) -> None:
        assert status_of(history(TWO_NODES, NodeLost("b", "the agent ended"))) == EXIT_INFRASTRUCTURE

    def test_the_exit_status_of_start_and_drain_timeouts_is_3(self) -> None:
        policy = make_policy(ONE_NODE)

        assert status_of(play(policy, START_S, Tick(), NodeEmpty("a"))[0]) == EXIT_INFRASTRUCTURE
        drained, _ = play(
            policy, *running(policy), ended(W0, 1050.0), DRAIN_S, Tick(), StacksReceived({}), NodeEmpty("a")
        )
        assert status_of(drained) == EXIT_INFRASTRUCTURE


@given(histories())
def test_every_history_that_ends_has_a_verdict(told: tuple[AttemptPolicy, list[tuple[float, Event]]]) -> None:
    steps = replay(*told)
    if steps and steps[-1][2].reason is not None:
        state = steps[-1][2]

        verdict = judged(state)

        assert verdict.message
        assert "  " not in verdict.message
        assert (verdict.reference == "succeeded") == (status_of(state) == 0)


def test_a_lost_node_is_the_cause_if_a_task_only_lost_its_peer() -> None:
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
