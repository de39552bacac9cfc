"""The final summary on the console, exactly as a user reads it, and report.json."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import TooFewGpusError
from launcher.gang.checks.findings import Finding
from launcher.gang.events import Event, Interrupted, NodeEmpty, NodeLost, NodeReady, NodeRefused, TaskExited
from launcher.gang.state import AttemptState
from launcher.report.models import ProgressReport, RunReport
from launcher.report.run_report import (
    Attempt,
    Earlier,
    RunEnd,
    end_by_error,
    end_by_signal,
    make_attempt_report,
    make_run_report,
)
from launcher.report.run_text import render_error, render_summary
from launcher.spec.strategies import RULES
from launcher.tasks import TaskId
from launcher.verdict.models import Verdict
from tests.harness.builders.gang import (
    ONE_NODE,
    TWO_NODES,
    W0,
    W1,
    listening,
    make_policy,
    play,
    preparing,
    running,
    started,
)
from tests.harness.builders.verdicts import UNAVAILABLE, ended, failed, judged, plan_of
from worker_entry.protocol.values import CrashRecord, Problem, TaskExit

LOCAL = {"local": [W0, W1]}


def attempt_of(state: AttemptState, number: int) -> Attempt:
    logs = {task: f"attempt-{number}/{task.type}-{task.index}.log" for task in state.policy.tasks}
    verdict = judged(state) if state.reason is not None else Verdict(reference="x", message="not over")
    return Attempt(number, state, plan_of(state.policy), verdict, 999.0, 1061.5, logs)


def make_report(
    state: AttemptState, *, left: dict[str, int | None] | None = None, end: RunEnd | None = None
) -> RunReport:
    return make_run_report(
        [attempt_of(state, 1)],
        run_id="20261121-143005-test-3f9a",
        name="test",
        directory="/runs/x",
        started=999.0,
        ended=1061.5,
        left=left or {"local": 0},
        versions={"distlaunch": "0.1.0"},
        end=end,
    )


def history(layout: dict[str, list[TaskId]], *events: Event | float, left_behind: int = 0) -> AttemptState:
    policy = make_policy(layout)
    return play(policy, *running(policy), *events, *(NodeEmpty(node, left_behind) for node in policy.nodes))[0]


class TestSummary:
    def test_the_summary_of_a_successful_run_shows_every_task(self) -> None:
        assert render_summary(make_report(history(LOCAL, ended(W0, 1050.0), ended(W1, 1051.0)))) == (
            "  worker:0  exit status 0\n"
            "  worker:1  exit status 0\n"
            "  0 processes left on this machine\n"
            "Succeeded in 62.5 s: both workers ended with status 0\n"
            "Logs: /runs/x · page: distlaunch report"
        )

    def test_the_summary_counts_stopped_processes_that_outlived_their_task(self) -> None:
        clean = [ended(W0, 1050.0), ended(W1, 1051.0)]

        one = render_summary(make_report(history(LOCAL, *clean, left_behind=1)))
        two = render_summary(make_report(history(LOCAL, *clean, left_behind=2)))

        assert "\n  0 processes left on this machine (1 process that outlived its task was stopped)\n" in one
        assert "\n  0 processes left on this machine (2 processes that outlived their task were stopped)\n" in two

    def test_the_summary_of_a_failed_run_shows_every_exit_and_the_status(self) -> None:
        state = history(TWO_NODES, failed(W1, 1050.0), ended(W0, 1052.0, by=signal.SIGKILL))

        assert render_summary(make_report(state)) == (
            "  worker:0  SIGKILL (signal 9), stopped by distlaunch\n"
            "  worker:1  exit status 1\n"
            "  0 processes left on 2 nodes\n"
            "Failed after 62.5 s, exit status 1\n"
            "Logs: /runs/x · page: distlaunch report"
        )

    def test_the_summary_aligns_task_names_of_different_lengths(self) -> None:
        workers = [TaskId("worker", 9), TaskId("worker", 10)]

        lines = render_summary(make_report(history({"a": workers}, *(ended(task, 1050.0) for task in workers))))

        assert lines.splitlines()[:2] == ["  worker:9   exit status 0", "  worker:10  exit status 0"]

    def test_the_summary_of_many_tasks_groups_them_by_exit(self) -> None:
        workers = [TaskId("worker", index) for index in range(64)]
        all_good = render_summary(make_report(history({"a": workers}, *(ended(task, 1050.0) for task in workers))))
        assert all_good.splitlines()[:2] == ["  64 tasks: exit status 0", "  0 processes left on 1 node"]
        others = (ended(task, 1052.0, by=signal.SIGTERM) for task in workers[:7] + workers[8:])
        state = history({"a": workers}, failed(workers[7], 1050.0), *others)
        assert render_summary(make_report(state)).splitlines()[:2] == [
            "  worker:7: exit status 1",
            "  63 tasks: SIGTERM (signal 15), stopped by distlaunch",
        ]

    def test_the_summary_of_success_shows_stopped_servers_as_finished(self) -> None:
        chief, server = TaskId("chief", 0), TaskId("ps", 0)
        tasks = [chief, W0, server]
        policy = replace(make_policy({"a": tasks}), strategy=RULES["parameter_server"])
        ends = [ended(chief, 1050.0), *(ended(task, 1052.0, by=signal.SIGTERM) for task in (W0, server))]
        state, _ = play(policy, *running(policy), *ends, NodeEmpty("a"))
        assert render_summary(make_report(state)).splitlines()[:3] == [
            "  chief:0   exit status 0",
            "  ps:0      stopped: training has finished",
            "  worker:0  stopped: training has finished",
        ]

    def test_the_summary_counts_no_processes_on_nodes_never_reached(self) -> None:
        state, _ = play(make_policy(TWO_NODES), NodeLost("b", "no route"), NodeLost("a", "no route"))
        assert render_summary(make_report(state, left={"a": 0, "b": 0})).splitlines() == [
            "Failed after 62.5 s, exit status 3",
            "Logs: /runs/x · page: distlaunch report",
        ]

    def test_the_summary_of_an_interrupted_run_shows_exits_and_status_130(self) -> None:
        ends = [ended(W0, 1052.0, by=signal.SIGTERM), ended(W1, 1052.0, 143)]

        assert render_summary(make_report(history(LOCAL, Interrupted(signal.SIGINT), *ends))) == (
            "  worker:0  SIGTERM (signal 15), stopped by distlaunch\n"
            "  worker:1  exit status 143, stopped by distlaunch\n"
            "  0 processes left on this machine\n"
            "Interrupted after 62.5 s, exit status 130\n"
            "Logs: /runs/x · page: distlaunch report"
        )

    def test_the_summary_of_a_refused_start_names_no_tasks(self) -> None:
        refusal = NodeRefused("a", (Problem("no-program", "there is no program /x"),))
        state, _ = play(make_policy(ONE_NODE), NodeReady("a"), refusal, NodeEmpty("a"))

        assert render_summary(make_report(state)) == (
            "  0 processes left on 1 node\nFailed after 62.5 s, exit status 2\nLogs: /runs/x · page: distlaunch report"
        )

    def test_the_summary_of_a_lost_node_reports_unknown_processes(self) -> None:
        state = history(TWO_NODES, NodeLost("b", "the agent ended"), ended(W0, 1051.0, by=signal.SIGTERM))

        assert render_summary(make_report(state, left={"a": 0, "b": None})) == (
            "  worker:0  SIGTERM (signal 15), stopped by distlaunch\n"
            "  worker:1  end not observed\n"
            "  0 processes left on 1 node\n"
            "  processes left on b: unknown; once reachable, run:\n"
            "    distlaunch clean /runs/x\n"
            "Failed after 62.5 s, exit status 3\n"
            "Logs: /runs/x · page: distlaunch report"
        )

    def test_the_summary_uses_the_singular_for_one_process(self) -> None:
        state = history(LOCAL, ended(W0, 1050.0), ended(W1, 1051.0))

        assert "  1 process left on this machine\n" in render_summary(make_report(state, left={"local": 1}))

    def test_the_summary_shows_a_task_that_was_not_started(self) -> None:
        policy = make_policy(TWO_NODES)
        state, _ = play(policy, *preparing(policy), *started(W0), failed(W0, 1001.0), *map(NodeEmpty, policy.nodes))

        assert "  worker:1  not started\n" in render_summary(make_report(state))

    def test_the_summary_does_not_mention_a_report_that_could_not_be_written(self) -> None:
        report = make_report(history(LOCAL, ended(W0, 1050.0), ended(W1, 1051.0)))

        assert render_summary(report, written=False).endswith("ended with status 0\nLogs: /runs/x")


class TestEnd:
    """What ended a run outside its attempts."""

    def test_a_usage_error_has_status_2_only_if_nothing_was_started(self) -> None:
        never_started, _ = play(make_policy(ONE_NODE), NodeReady("a"))
        error = TooFewGpusError("c has 0 GPUs", hint="lower it")

        assert make_report(never_started, end=end_by_error(error)).exit_status == 2
        report = make_report(history(ONE_NODE, failed(W0, 1050.0)), end=end_by_error(error))
        assert (report.outcome, report.exit_status) == ("failed", 3)
        assert report.verdict == Verdict(reference="too-few-gpus", message="c has 0 GPUs", hint="lower it")

    def test_a_refusal_has_status_2_only_in_the_first_attempt(self) -> None:
        refusal = NodeRefused("a", (Problem("no-program", "there is no program /x"),))
        refused, _ = play(make_policy(ONE_NODE), NodeReady("a"), refusal, NodeEmpty("a"))
        report = make_report(refused)
        first = history(ONE_NODE, failed(W0, 1050.0))
        again = make_run_report(
            [attempt_of(first, 1), attempt_of(refused, 2)], run_id="x", name="x", directory="/", started=0.0, ended=1.0,
            left={"a": 0}, versions={},
        )  # fmt: skip

        assert (report.exit_status, again.exit_status) == (2, 3)
        assert again.verdict.reference == "no-program"

    def test_an_unexpected_exception_is_reported_as_a_bug(self) -> None:
        report = make_report(history(ONE_NODE), end=end_by_error(KeyError("worker:7")))

        assert (report.exit_status, report.verdict.reference) == (70, "bug")
        assert report.verdict.message == "a bug in distlaunch: KeyError('worker:7')"

    def test_a_signal_between_attempts_is_reported_as_an_interruption(self) -> None:
        report = make_report(history(ONE_NODE, failed(W0, 1050.0)), end=end_by_signal(signal.SIGTERM))

        assert (report.outcome, report.exit_status, report.verdict.reference) == ("interrupted", 143, "interrupted")
        assert report.attempts[0].verdict.reference == "task-failed"


def test_foreign_text_is_printable_everywhere_in_the_report() -> None:
    """This covers report.json, the output of `check --json`, and every place that shows the report."""
    crash = CrashRecord(1050.0, "E\x1b[2J", "\u202egnp.\x9b31m", "\udce9.py", 3)
    progress = ProgressReport(step=1, first_step=1, began=1.0, metrics={"loss\x1b]0;x\x07": 1.0})
    report = make_report(history(LOCAL, replace(failed(W1, 1050.0), crash=crash)))
    finding = Finding(level="error", node="a\x1b[A", reference="x", message="\x07", hint="\x9d")

    for model in (report, progress, finding):
        text = model.model_dump_json()
        assert not [char for char in json.loads(f'"{json.dumps(text)[1:-1]}"') if not char.isprintable()]
        assert not [1 for char in ("u001b", "u0007", "\x9b", "\x9d", "\u202e") if char in text]
    assert report.attempts[0].tasks[1].crash is not None
    assert report.attempts[0].tasks[1].crash.message == r"\u202egnp.\x9b31m"


class TestManyAttempts:
    def report(self, count: int) -> RunReport:
        state = history(LOCAL, failed(W1, 1050.0))
        logs = dict.fromkeys(state.policy.tasks, "log")
        earlier = Earlier()
        for number in range(1, count):
            reference = "preempted" if number % 10 else "task-killed"
            verdict = Verdict(reference=reference, message=f"it was attempt {number}")
            attempt = Attempt(number, state, plan_of(state.policy), verdict, 1.0 * number, 0.0, logs)
            earlier = earlier.add(make_attempt_report(attempt))
        last = Attempt(count, state, plan_of(state.policy), judged(state), 1.0 * count, 1061.5, logs)
        return make_run_report(
            [last],
            earlier=earlier,
            run_id="r",
            name="test",
            directory="/runs/x",
            started=1.0,
            ended=1061.5,
            left={"local": 0},
            versions={},
        )

    def test_up_to_100_attempts_are_all_reported(self) -> None:
        report = self.report(100)

        assert [attempt.attempt for attempt in report.attempts] == [*range(1, 101)]
        assert report.left_out is None

    def test_the_report_of_more_than_100_attempts_counts_those_left_out(self) -> None:
        report = self.report(2001)

        assert [attempt.attempt for attempt in report.attempts] == [*range(1, 21), *range(1922, 2002)]
        assert report.started == 1.0
        assert report.left_out is not None
        assert (report.left_out.first, report.left_out.last) == (21, 1921)
        assert sum(report.left_out.references.values()) == 1901
        assert report.left_out.references == {"preempted": 1711, "task-killed": 190}

    def test_the_summary_of_2001_attempts_has_fewer_than_40_lines(self) -> None:
        lines = render_summary(self.report(2001)).splitlines()

        assert "  2,001 attempts; before the last one:" in lines
        assert "    … 1,980 more: 1,782 preempted, 198 task-killed" in lines
        assert "    10: it was attempt 10 [task-killed]" in lines
        assert "    1991: it was attempt 1991 [preempted]" in lines
        assert len(lines) < 40


class TestError:
    def test_an_error_shows_message_evidence_log_and_hint(self) -> None:
        state = history(
            TWO_NODES,
            failed(W0, 1044.0, "UnavailableError", UNAVAILABLE, raised=1042.9),
            failed(W1, 1043.0, "ModuleNotFoundError", "No module named 'pandas'", raised=1042.0),
        )

        assert render_error(judged(state), ["Traceback (most recent call last):", "ModuleNotFoundError: …"]) == (
            "Error: worker:1 on b exited with status 1 after 42.0 s [task-failed]\n"
            "  ModuleNotFoundError: No module named 'pandas'   train.py:88\n"
            "  worker:0 failed 0.9 s later because of it\n"
            "  log: /runs/x/attempt-1/worker-1.log\n"
            "    worker:1 │ Traceback (most recent call last):\n"
            "    worker:1 │ ModuleNotFoundError: …\n"
            "  install the module for the Python that the tasks use, or set PYTHONPATH"
        )

    def test_an_error_without_evidence_or_hint_is_one_line(self) -> None:
        assert render_error(Verdict(reference="start-timeout", message="no answer from b within 600 s")) == (
            "Error: no answer from b within 600 s [start-timeout]"
        )

    def test_an_error_on_the_console_contains_no_control_sequences(self) -> None:
        verdict = Verdict(
            reference="task-failed", message="it", task="worker:0", evidence=["\x1b[31mValueError\x1b[0m: \x1b[2J"]
        )

        shown = render_error(verdict, ["50%\x1b[A\x1b[K\x07", "tab\tstays"])

        assert shown.splitlines()[1:] == [
            "  ␛[31mValueError␛[0m: ␛[2J",
            "    worker:0 │ 50%␛[A␛[K␇",
            "    worker:0 │ tab\tstays",
        ]


class TestReport:
    def test_the_report_contains_all_known_facts_of_a_task(self) -> None:
        crash = CrashRecord(1042.0, "ValueError", "no", "train.py", 88)
        policy = make_policy(TWO_NODES)
        state, _ = play(
            policy,
            *preparing(policy),
            *started(W0, W1),
            *listening(W0),
            TaskExited(W1, TaskExit(None, signal.SIGABRT, core_dumped=True), 1043.0, crash),
        )

        attempt = make_report(state).attempts[0]

        assert attempt.tasks[1].model_dump() == {
            "task": "worker:1",
            "node": "b",
            "address": "10.0.0.1:20001",
            "unguarded": None,
            "pid": 101,
            "started": 1000.0,
            "port_opened": None,
            "ended": 1043.0,
            "exit_code": None,
            "exit_signal": 6,
            "core_dumped": True,
            "finished": False,
            "stopped_by_us": False,
            "crash": {
                "time": 1042.0,
                "exception": "ValueError",
                "message": "no",
                "file": "train.py",
                "line": 88,
                "thread": None,
            },
            "progress": None,
            "log": "attempt-1/worker-1.log",
        }
        assert attempt.tasks[0].port_opened == 1001.0
        assert attempt.cluster_up is None

    def test_the_report_records_when_the_cluster_was_up(self) -> None:
        state = history(TWO_NODES, ended(W0, 1050.0), ended(W1, 1051.0))

        assert make_report(state).attempts[0].cluster_up == 1001.0

    def test_the_report_sums_up_cleaned_processes_of_all_nodes(self) -> None:
        policy = make_policy(TWO_NODES)
        state, _ = play(policy, *running(policy), failed(W0, 1050.0), NodeEmpty("a", 1, 2), NodeEmpty("b", 3, 4))

        attempt = make_report(state).attempts[0]

        assert (attempt.left_behind, attempt.killed) == (4, 6)

    def test_the_report_survives_a_json_round_trip(self) -> None:
        report = make_report(history(TWO_NODES, failed(W1, 1050.0), ended(W0, 1052.0, by=signal.SIGKILL)))

        assert RunReport.model_validate(json.loads(json.dumps(report.model_dump(mode="json")))) == report
        assert RunReport.model_validate_json(report.model_dump_json()) == report

    def test_the_report_stores_text_that_is_not_unicode_as_escapes(self) -> None:
        state = history(ONE_NODE, failed(W0, 1050.0, message="no file 'caf\udce9'"))

        report = make_report(state)

        crash = report.attempts[0].tasks[0].crash
        assert crash is not None
        assert crash.message == "no file 'caf\\udce9'"
        json.dumps(report.model_dump(mode="json"), ensure_ascii=False).encode()
        assert "no file 'caf\\udce9'" in render_error(report.attempts[0].verdict)

    def test_the_report_rejects_unknown_fields(self) -> None:
        data = make_report(history(ONE_NODE, failed(W0, 1050.0))).model_dump(mode="json")

        with pytest.raises(ValueError, match="surprise"):
            RunReport.model_validate({**data, "surprise": 1})


def test_the_report_schema_describes_every_field() -> None:
    schema = RunReport.model_json_schema()
    models: dict[str, Any] = {"RunReport": schema, **schema["$defs"]}

    silent = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, described in model["properties"].items()
        if not described.get("description")
    ]

    assert models.keys() == {
        "RunReport",
        "AttemptReport",
        "CollectedNode",
        "CompileCacheReport",
        "TaskReport",
        "CrashReport",
        "Verdict",
        "ProgressReport",
        "LeftOutAttempts",
        "WarmNode",
        "FaultReport",
        "Goodput",
        "SpeedReport",
        "NodeSpeed",
        "LinkSpeed",
        "Finding",
    }
    assert silent == []
