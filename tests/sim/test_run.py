"""Whole runs on nodes that follow a script: which failures are restarted, with which report and exit status."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher import failures
from launcher.controller.nodes import Recovered
from launcher.errors import DistlaunchError, RunDirectoryError, ShownError, TakenOverError, UsageError
from launcher.gang.state import Phase
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.planner import Planner
from launcher.rundir.directory import replace_text
from launcher.rundir.owner import this_process
from tests.harness.apart import linux
from tests.harness.builders.specs import restarting
from tests.sim.clock import BEGAN
from tests.sim.nodes import (
    KILL,
    TERM,
    At,
    Exit,
    FakeAgent,
    FakeRun,
    Script,
    Steps,
    answer_late,
    be_taken_over,
    empty_and_lost,
    fall_silent,
    ignore_term,
    lose,
    refuse,
    say,
    say_nothing,
    user,
)
from worker_entry.agent.connection.lease import MARGIN_S
from worker_entry.protocol.messages import Empty, Saved
from worker_entry.protocol.orders import Goodbye, Start, Stop
from worker_entry.protocol.values import Problem, TaskExit

FOR_EVER = 1e6
GPU_C = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c"}]}
SPARE = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c", "spare": True}]}
GRACE_S = 1.1
"""The longest time to stop tasks that end when asked to."""


# --- each class of failure ---


@dataclass(frozen=True)
class Failure:
    """The script of an attempt with this failure, and the exit status without a restart."""

    script: Script
    exit_status: int
    spec: Mapping[str, Any] = field(default_factory=dict)


CRASHED = TaskExit(1)
MET_ANOTHER = "Collective instance 7 expected group size 2, got 1"
FAILURES: dict[str, Failure] = {
    "task-failed": Failure([Exit("worker:1", CRASHED, crash="ValueError: no batch")], 1),
    "task-killed": Failure([Exit("worker:1", KILL)], 1),
    "out-of-memory": Failure([Exit("worker:1", CRASHED, crash="ResourceExhaustedError: OOM when allocating")], 1),
    "port-taken": Failure([Exit("worker:1", TaskExit(1), log="Could not start gRPC server\n")], 3),
    "preempted": Failure([Exit("worker:1", TERM)], 1),
    "ended-early": Failure(
        [Exit("worker:0", TaskExit(0)), Exit("worker:1", CRASHED, 25.0, crash="UnavailableError: Socket closed")], 1
    ),
    "out-of-step": Failure([Exit("worker:1", CRASHED, crash=f"InternalError: {MET_ANOTHER}")], 1),
    "disk-full": Failure([Exit("worker:1", CRASHED, evidence=Problem("disk-full", "no space on gpu-b"))], 3),
    "version-mismatch": Failure([Exit("worker:1", CRASHED, log="Descriptors cannot be created directly\n")], 1),
    "start-timeout": Failure([At(Phase.FORMING, say_nothing)], 3, {"timeouts": {"start_s": 30}}),
    "drain-timeout": Failure(
        [Exit("worker:0", TaskExit(0)), Exit("worker:1", TaskExit(0), FOR_EVER)], 3, {"timeouts": {"drain_s": 60}}
    ),
    "stalled": Failure(
        [
            Exit(f"worker:{index}", TaskExit(0), seconds, n)
            for index in (0, 1)
            for n, seconds in ((1, FOR_EVER), (2, 9))
        ],
        3,
        {"timeouts": {"stall_s": 60}},
    ),
    "node-lost": Failure([At(Phase.RUNNING, lose("cable pulled", left=0))], 3, SPARE),
}


def test_the_simulated_failures_cover_every_failure_class() -> None:
    assert FAILURES.keys() == failures.FAILURES.keys()


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_restarts_after_each_failure_class_named_in_restart_on(tmp_path: Path, name: str) -> None:
    failure = FAILURES[name]
    run = FakeRun(tmp_path / "run", failure.script, {**failure.spec, **restarting(on=[name])})
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == [name, "succeeded"]
    assert (report.outcome, report.exit_status) == ("succeeded", 0)
    is_free = name == "preempted"  # port-taken is counted, because only the program's output reports it
    cost = "not counted" if is_free else "restart 1 of 1"
    assert f"Restarting: attempt 2 ({cost})" in run.said
    first, last = report.attempts
    assert (first.processes_left, last.processes_left) == (None if name == "node-lost" else 0, 0)
    began = [task.started for task in last.tasks if task.started is not None]
    assert len(began) == 2
    assert min(began) >= first.ended
    assert [task.log for task in last.tasks] == ["attempt-2/worker-0.log", "attempt-2/worker-1.log"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_run_does_not_restart_after_a_failure_class_missing_from_restart_on(tmp_path: Path, name: str) -> None:
    failure = FAILURES[name]
    others = [other for other in FAILURES if other != name]
    run = FakeRun(tmp_path / "run", failure.script, {**failure.spec, **restarting(5, on=others)})
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == [name]
    assert (report.outcome, report.exit_status) == ("failed", failure.exit_status)
    assert f"not started again: `restart.on` does not name {name}" in run.said
    assert "Restarting" not in run.said


def test_a_run_does_not_restart_by_default(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:1", KILL)])
    assert [attempt.verdict.reference for attempt in run.run().attempts] == ["task-killed"]
    assert "tarted again" not in run.said


def test_a_run_does_not_restart_if_a_node_refuses_before_the_start(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.PREPARING, refuse("no-program", "no train.py"))], restarting(5))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["no-program"]
    assert (report.outcome, report.exit_status) == ("failed", 2)
    assert "Error: gpu-b: no train.py [no-program]" in run.said


@pytest.mark.parametrize(
    ("script", "attempts"),
    [
        ([At(Phase.FORMING, say_nothing), Exit("worker:1", CRASHED, 2.0, crash="ImportError: no")], 1),
        ([Exit("worker:1", CRASHED, crash="ValueError: no")], 2),  # all ports were open: it may have trained
        ([Steps("worker:0", None, 0), Exit("worker:1", CRASHED, crash="ValueError: no")], 1),
        ([Steps("worker:0", 1, 9), Exit("worker:1", CRASHED, crash="ValueError: no")], 2),
    ],
)
def test_a_program_that_fails_before_its_first_step_is_not_restarted(
    tmp_path: Path, script: Script, attempts: int
) -> None:
    run = FakeRun(tmp_path / "run", script, restarting())
    assert len(run.run().attempts) == attempts
    assert ("the program failed before its first training step" in run.said) == (attempts == 1)


def test_a_command_that_fails_before_any_known_step_is_restarted(tmp_path: Path) -> None:
    script: Script = [At(Phase.FORMING, say_nothing), Exit("worker:1", CRASHED, 2.0)]
    run = FakeRun(tmp_path / "run", script, {"program": {"command": ["train"]}, **restarting()})
    assert [attempt.verdict.reference for attempt in run.run().attempts] == ["task-failed", "succeeded"]


# --- limits and pauses ---


def failing(*attempts: int, how: TaskExit = KILL, after_s: float = 20.0) -> list[Exit]:
    return [Exit("worker:1", how, after_s, attempt) for attempt in attempts]


def pauses(report: Any) -> list[float]:
    times = [(attempt.started, attempt.ended) for attempt in report.attempts]
    return [round(after - before, 1) for (_, before), (after, _) in itertools.pairwise(times)]


def test_restarts_stop_at_their_limit_and_pauses_double(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", failing(1, 2, 3, 4, 5), restarting(4, pause_s=2))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed"] * 5
    assert (report.outcome, report.exit_status) == ("failed", 1)
    assert pauses(report) == [0.0, 2.0, 4.0, 8.0]
    assert "Restarting in 8 s: attempt 5 (restart 4 of 4)" in run.said
    assert "not started again: 4 restarts did not help" in run.said
    assert run.said.count("Error: worker:1 on gpu-b was killed by SIGKILL") == 5


def test_a_run_ends_after_three_attempts_in_a_row_without_a_checkpoint(tmp_path: Path) -> None:
    saves = At(Phase.RUNNING, say(Saved("ckpt-1", BEGAN)), attempt=2)
    steps = [Steps(f"worker:{index}", 1, 5, attempt=attempt) for index in (0, 1) for attempt in range(1, 9)]
    run = FakeRun(tmp_path / "run", [*failing(*range(1, 9)), *steps, saves], restarting(100, pause_s=0))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed"] * 5
    assert (report.outcome, report.exit_status, report.verdict.reference) == ("failed", 93, "no-progress")
    assert report.verdict.message.startswith("3 attempts in a row saved no checkpoint; the last one: worker:1 on gpu-b")
    assert "not started again: the last 3 attempts saved no checkpoint and got no further" in run.said


def test_preemptions_do_not_count_as_restarts(tmp_path: Path) -> None:
    saved = [
        deed
        for index in (0, 1)
        for attempt in (1, 2, 3)
        for deed in (
            Steps(f"worker:{index}", 1, 9, attempt=attempt, saves=True),
            Exit(f"worker:{index}", TaskExit(42), 20.0, attempt),
        )
    ]
    run = FakeRun(tmp_path / "run", [*saved, *failing(4)], restarting(1, pause_s=0))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == [
        *["preempted"] * 3,
        "task-killed",
        "succeeded",
    ]
    assert run.said.count("(not counted)") == 3
    assert "attempt 5 (restart 1 of 1)" in run.said
    assert not any(task.stopped_by_us for task in report.attempts[0].tasks)


def test_the_restart_limit_counts_only_restarts_within_the_period(tmp_path: Path) -> None:
    others = [Exit("worker:0", TaskExit(0), FOR_EVER, attempt) for attempt in (1, 2, 3)]
    tasks = [*failing(1, 2, 3, after_s=4000.0), *others, *failing(4)]
    run = FakeRun(tmp_path / "run", tasks, restarting(1, period_s=3600))
    report = run.run()
    assert len(report.attempts) == 4  # the last two followed soon after each other
    assert "not started again: 1 restart within 3600 s did not help" in run.said
    assert report.ended - report.started > 3 * 4000


def test_check_speed_measures_only_the_first_attempt_and_reports_slow_links(tmp_path: Path) -> None:
    spec = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}], "check_speed": True, **restarting()}
    run = FakeRun(tmp_path / "run", failing(1), spec, checks=True)
    report = run.run()
    measured = ["MeasureNode"] * 3 + ["MeasureLink"] * 3  # nodes: one start and two rounds; a slow link: three rounds
    again = ["Prepare", "Start", "Stop", "Goodbye"]
    assert run.nodes.kinds_of("gpu-a") == ["Hello", "Prepare", "Inspect", "Dial", *measured, "Start", "Stop", *again]
    link = (
        "the link between gpu-a and gpu-b is slow: network 10 MB/s, 0.18 × the median of 55 MB/s, from gpu-b to gpu-a"
    )
    [told] = [line for line in run.said.splitlines() if "is slow" in line]
    assert link in told
    assert report.speed is not None
    assert [node.node for node in report.speed.nodes] == ["gpu-a", "gpu-b"]
    assert [finding.message.startswith(link) for finding in report.speed.findings] == [True]


def test_check_speed_measures_nothing_without_checks_or_after_a_failed_check(tmp_path: Path) -> None:
    for name, more in (
        ("unchecked", {"checks": False}),
        ("refused", {"checks": True, "refused": {"gpu-b": ["worker:0"]}}),
    ):
        spec = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}], "check_speed": True}
        run = FakeRun(tmp_path / name, [], spec, **more)
        with contextlib.suppress(DistlaunchError):
            run.run()
        assert "MeasureNode" not in run.nodes.kinds_of("gpu-a")


def test_a_restart_does_not_check_or_connect_nodes_again(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path / "run", failing(1), {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}], **restarting()}, checks=True
    )
    run.run()
    assert run.nodes.kinds_of("gpu-b") == [
        *("Hello", "Prepare", "Inspect", "Dial", "Start", "Stop", "Prepare", "Start", "Stop", "Goodbye")
    ]


def test_a_plan_warning_is_shown_once_over_several_attempts(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path / "run", failing(1), {"nodes": [{"host": "gpu-a", "gpus": ["0"]}, {"host": "gpu-b"}], **restarting()}
    )
    assert len(run.run().attempts) == 2
    assert run.said.count("gpu-a has no GPU 0: the program would train on the CPU instead") == 1


def test_the_program_folder_is_sent_once_over_several_attempts(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print('hello')\n")
    run = FakeRun(tmp_path / "run", failing(1), {"sync": {"path": "project", "to": "~/project"}, **restarting()})
    assert len(run.run().attempts) == 2
    assert run.nodes.kinds_of("gpu-b").count("Offer") == 1


# --- signals of the user ---


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("phase", [Phase.CONNECTING, Phase.PREPARING, Phase.FORMING, Phase.RUNNING], ids=str)
def test_a_signal_interrupts_a_run_in_any_phase_without_a_restart(
    tmp_path: Path, phase: Phase, signum: int, status: int
) -> None:
    run = FakeRun(tmp_path / "run", [At(phase, user(signum))], restarting(5))
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", status, 1)
    assert report.verdict.reference == "interrupted"
    assert f"Interrupted after {report.ended - report.started:.1f} s, exit status {status}" in run.said
    assert "Restarting" not in run.said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("restarts", "outcome"), [(5, "interrupted"), (0, "failed")])
def test_a_signal_while_a_failed_attempt_stops_prevents_its_restart(
    tmp_path: Path, signum: int, restarts: int, outcome: str
) -> None:
    run = FakeRun(tmp_path / "run", [*failing(1), At(Phase.STOPPING, ignore_term, "gpu-a")], restarting(restarts))
    run.timing.after(20.5, partial(signal.raise_signal, signum))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed"]
    assert (report.outcome, report.exit_status) == (outcome, 128 + signum if restarts else 1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_stopping_a_succeeded_attempt_does_not_change_the_outcome(tmp_path: Path, signum: int) -> None:
    spec = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b", "tasks": {"evaluator": 1}}]}
    script: Script = [Exit("evaluator:0", TaskExit(0), FOR_EVER), At(Phase.STOPPING, ignore_term)]
    run = FakeRun(tmp_path / "run", script, {**spec, "timeouts": {"drain_s": 10}, **restarting()})
    run.timing.after(110.5, partial(signal.raise_signal, signum))
    report = run.run()
    assert (report.outcome, report.exit_status) == ("succeeded", 0)


def test_the_report_of_an_interrupted_restart_contains_the_first_attempt(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [*failing(1), At(Phase.RUNNING, user(signal.SIGTERM), attempt=2)], restarting(5))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed", "interrupted"]
    assert (report.outcome, report.exit_status) == ("interrupted", 143)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_restart_pause_immediately(tmp_path: Path, signum: int) -> None:
    run = FakeRun(tmp_path / "run", failing(1, 2), restarting(5, pause_s=500))
    run.timing.after(100.0, partial(signal.raise_signal, signum))
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", 128 + signum, 2)
    assert report.verdict.message == f"interrupted by {TaskExit(signal=signum)} before the next attempt"
    assert report.ended - BEGAN == pytest.approx(1100, abs=0.1)
    assert report.attempts[1].verdict.reference == "task-killed"


def test_a_stack_request_does_not_end_a_restart_pause(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", failing(1, 2), restarting(5, pause_s=500))
    run.timing.after(100.0, partial(signal.raise_signal, signal.SIGUSR1))
    report = run.run()
    assert report.outcome == "succeeded"
    assert pauses(report) == [0.0, 500.0]


# --- a node is lost ---


def test_a_spare_replaces_a_lost_node(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path / "run", [At(Phase.RUNNING, lose("cable pulled", left=0))], {**SPARE, **restarting()}, checks=True
    )
    report = run.run()
    assert [(task.task, task.node) for task in report.attempts[1].tasks] == [
        ("worker:0", "gpu-a"),
        ("worker:1", "gpu-c"),
    ]
    assert "gpu-c takes the place of gpu-b" in run.said
    [start] = [order for order in run.nodes.orders_of("gpu-c") if isinstance(order, Start)]
    assert start.cluster == {"worker": ["gpu-a:20500", "gpu-c:20500"]}
    assert [task.task for task in start.tasks] == ["worker:1"]
    assert run.nodes.kinds_of("gpu-c") == [*("Hello", "Prepare", "Inspect", "Dial", "Start", "Stop", "Goodbye")]
    assert run.nodes.kinds_of("gpu-a").count("Dial") == 2  # it has to reach the new node
    assert run.nodes.connections == {"gpu-a": 1, "gpu-b": 1, "gpu-c": 1}
    assert report.attempts[1].processes_left == 0


def test_an_unreachable_spare_is_replaced_by_the_next_spare(tmp_path: Path) -> None:
    nodes = [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c", "spare": True}, {"host": "gpu-d", "spare": True}]
    script = [At(Phase.RUNNING, lose(left=0)), At(Phase.CONNECTING, lose("no route", left=0), "gpu-c")]
    run = FakeRun(tmp_path / "run", script, {"nodes": nodes, **restarting(2)})
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["node-lost", "node-unreachable", "succeeded"]
    assert [task.node for task in report.attempts[2].tasks] == ["gpu-a", "gpu-d"]


def test_a_node_that_answers_between_two_attempts_imports_early_as_well(tmp_path: Path) -> None:
    spares = [{"host": f"gpu-{letter}", "spare": True} for letter in "def"]
    nodes = [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c"}, *spares]
    script: Script = [
        At(Phase.RUNNING, lose(left=0), "gpu-b"),
        At(Phase.STOPPING, lose(left=0), "gpu-c"),
        At(Phase.CONNECTING, lose("no route"), "gpu-d"),  # its tasks may still run: the next attempt waits
        At(Phase.CONNECTING, answer_late(5.0), "gpu-e"),
    ]
    run = FakeRun(tmp_path / "run", script, {"nodes": nodes, "preload": True, **restarting(2)})
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["node-lost", "node-unreachable", "succeeded"]
    assert [task.node for task in report.attempts[2].tasks] == ["gpu-a", "gpu-e", "gpu-f"]
    assert run.nodes.connections["gpu-e"] == 1
    for node in ("gpu-a", "gpu-e", "gpu-f"):
        assert run.nodes.kinds_of(node).count("Preload") == 1, node


def test_a_node_unreachable_at_the_first_start_is_not_replaced(tmp_path: Path) -> None:
    script = [At(Phase.CONNECTING, lose("no route"))]
    report = FakeRun(tmp_path / "run", script, {**SPARE, **restarting(5)}).run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["node-unreachable"]
    assert report.exit_status == 3


def test_a_spare_with_too_few_gpus_ends_the_run_with_a_report(tmp_path: Path) -> None:
    """Too few GPUs is a usage error only before the first start."""
    spare = {"host": "gpu-c", "spare": True, "gpus_per_worker": 64}
    spec = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}, spare], **restarting()}
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose(left=0))], spec)
    with pytest.raises(ShownError):
        run.run()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["exit_status"], report["verdict"]["reference"]) == ("failed", 3, "too-few-gpus")
    first, last = report["attempts"]
    assert (first["verdict"]["reference"], last["verdict"]) == ("node-lost", report["verdict"])
    assert [task["started"] for task in last["tasks"]] == [None, None]
    assert " 1 worker with 64 each would need 64 [too-few-gpus]\n" in run.said
    assert run.said.endswith(f"exit status 3\nLogs: {tmp_path}/run · page: distlaunch report")


def test_a_smaller_cluster_continues_after_a_loss_if_min_workers_allows(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose(left=0))], {**GPU_C, **restarting(min_workers=2)})
    report = run.run()
    assert report.outcome == "succeeded"
    assert [task.node for task in report.attempts[1].tasks] == ["gpu-a", "gpu-c"]
    assert "continuing without gpu-b\n2 of 3 workers are left" in run.said


@pytest.mark.parametrize("return_s", [0, 30])
def test_a_run_ends_if_a_lost_node_is_neither_replaced_nor_returns(tmp_path: Path, return_s: float) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose("cable pulled"))], restarting(return_s=return_s))
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("failed", 3, 1)
    assert report.verdict.message == "node gpu-b was lost: cable pulled"
    assert "not started again: no spare node fits, and too few nodes are left" in run.said
    assert ("waiting up to 30 s for gpu-b to come back" in run.said) == bool(return_s)
    assert report.ended - report.attempts[0].ended == pytest.approx(return_s, abs=0.5)
    assert len(run.asked) == return_s / 2 + bool(return_s)
    assert (report.attempts[0].processes_left, report.attempts[0].unverified) == (None, ["gpu-b"])
    assert f"processes left on gpu-b: unknown; once reachable, run:\n    distlaunch clean {tmp_path}/run" in run.said


def test_a_node_lost_after_its_tasks_ended_fails_the_next_attempt(tmp_path: Path) -> None:
    """The node is lost while the other node is still being stopped."""
    script: Script = [
        At(Phase.STOPPING, empty_and_lost),
        At(Phase.STOPPING, ignore_term, node="gpu-a"),
        Exit("worker:0", CRASHED, crash="ValueError: no"),
    ]
    report = FakeRun(tmp_path / "run", script, restarting()).run()
    first, second = report.attempts[:2]
    assert first.processes_left == 0
    assert second.verdict.reference == "node-lost"
    assert second.ended - second.started < 5.0


def test_a_replaced_controller_stops_no_node_and_writes_no_report(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, be_taken_over)], restarting())
    controller = asdict(this_process())
    facts = {"run_id": "run", "controller": controller, "ended": False, "generation": 1}
    run.files.write_json(run.files.run, facts)
    with pytest.raises(TakenOverError):
        run.run()
    assert not [order for _, order in run.nodes.orders if isinstance(order, (Stop, Goodbye))]
    assert not run.files.report.exists()


def test_an_agent_that_falsely_claims_a_takeover_is_lost(tmp_path: Path) -> None:
    report = FakeRun(tmp_path / "run", [At(Phase.RUNNING, be_taken_over)]).run()
    assert report.verdict.reference == "node-lost"


def test_a_lost_node_that_returns_is_used_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose())], restarting(), recover=4)
    report = run.run()
    assert report.outcome == "succeeded"
    assert [task.node for task in report.attempts[1].tasks] == ["gpu-a", "gpu-b"]
    assert run.asked == [("gpu-b", "/run/agent")] * 4  # about the agent with the tasks that must have ended
    assert "No spare node is left; waiting up to 300 s for gpu-b to come back\ngpu-b: back after 6.0 s" in run.said
    assert run.nodes.connections == {"gpu-a": 1, "gpu-b": 2}
    assert "certainly ended" not in run.said  # their end was observed
    assert pauses(report) == [6.0]


def test_a_returned_node_without_proof_of_ended_tasks_waits_for_its_lease(tmp_path: Path) -> None:
    """For example, a recreated container: it cannot see the processes of the previous one."""
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose())], restarting(), recover=4, recovered=Recovered.UNPROVEN)
    report = run.run()
    assert report.outcome == "succeeded"
    assert "gpu-b: back after 6.0 s" in run.said
    began = report.attempts[1].started - report.attempts[0].ended
    assert began == pytest.approx(60 + MARGIN_S, abs=GRACE_S)
    assert "Tasks may still run on gpu-b; waiting 64 s until they have certainly ended" in run.said


def test_a_signal_ends_the_wait_for_a_lost_node(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose())], restarting())
    run.timing.after(60.0, partial(signal.raise_signal, signal.SIGINT))
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", 130, 1)
    assert report.ended - BEGAN == pytest.approx(1060, abs=0.1)
    assert "not started again" not in run.said


@pytest.mark.parametrize("left", [None, 0])
def test_a_restart_waits_until_the_tasks_of_a_lost_node_have_ended(tmp_path: Path, left: int | None) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose(left=left))], {**SPARE, **restarting()})
    report = run.run()
    assert report.outcome == "succeeded"
    lost = report.attempts[0].ended
    began = report.attempts[1].started
    if left is None:
        fence_s = 60 + MARGIN_S
        assert began - lost == pytest.approx(fence_s, abs=GRACE_S)
        assert f"Tasks may still run on gpu-b; waiting {fence_s:.0f} s until they have certainly ended" in run.said
    else:
        assert began == lost
    assert ("may still run" in run.said) == (left is None)


def test_the_fencing_time_of_a_lost_node_counts_from_its_last_message(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, fall_silent)], {**SPARE, **restarting()})
    report = run.run()
    began = report.attempts[1].started
    silent = BEGAN + 1010
    assert began - silent == pytest.approx(60 + MARGIN_S, abs=0.1)


def test_a_signal_ends_the_fencing_wait_without_another_pause(tmp_path: Path) -> None:
    script: Script = [*failing(1), At(Phase.RUNNING, lose(), attempt=2)]
    run = FakeRun(tmp_path / "run", script, {**SPARE, **restarting(5, pause_s=500)})
    run.timing.after(60.0, partial(signal.raise_signal, signal.SIGINT))
    report = run.run()
    assert "until they have certainly ended" in run.said
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", 130, 2)
    assert report.ended - BEGAN == pytest.approx(1060, abs=0.1)
    assert "attempt 3" not in run.said


def test_a_signal_while_stopping_after_a_node_loss_uses_no_spare(tmp_path: Path) -> None:
    script = [At(Phase.RUNNING, lose()), At(Phase.STOPPING, ignore_term, "gpu-a")]
    run = FakeRun(tmp_path / "run", script, {**SPARE, **restarting(5)})
    run.timing.after(10.5, partial(signal.raise_signal, signal.SIGTERM))
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", 143, 1)
    assert "takes the place" not in run.said
    assert "ended for certain" not in run.said


def test_a_node_lost_during_a_restart_pause_fails_the_next_attempt(tmp_path: Path) -> None:
    agents: list[FakeAgent] = []

    def remember(agent: FakeAgent) -> bool:
        agents.append(agent)
        return True

    script: Script = [*failing(1, 2), At(Phase.CONNECTING, remember)]
    run = FakeRun(tmp_path / "run", script, {**SPARE, **restarting(5, pause_s=500)})
    run.timing.after(100.0, lambda: agents[0].lose("cable pulled", 0))
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == [
        *("task-killed", "task-killed", "node-lost", "succeeded")
    ]
    assert report.attempts[2].verdict.message == "node gpu-b was lost: cable pulled"
    assert {task.started for task in report.attempts[2].tasks} == {None}
    assert pauses(report) == [0.0, 500.0, 500.0]


def test_later_messages_of_a_lost_agent_are_ignored(tmp_path: Path) -> None:
    """The node is back; a task whose end the lost agent reports is not the task of the next attempt."""

    def linger(agent: FakeAgent) -> bool:
        agent.world.timing.after(50.0, lambda: agent.end(Exit("worker:1", KILL)))
        agent.lose("cable pulled", None)
        return False

    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, linger)], restarting(), recover=1)
    report = run.run()
    assert [attempt.verdict.reference for attempt in report.attempts] == ["node-lost", "succeeded"]
    assert report.attempts[1].ended - report.attempts[1].started > 100


# --- an error of distlaunch ---


@dataclass(frozen=True)
class BadPlanner(Planner):
    """Plans so many times, then raises."""

    left: list[int] = field(default_factory=list)
    error: Exception = field(default_factory=RuntimeError)

    def plan(self, *facts: Any, **more: Any) -> LaunchPlan:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise self.error
        return super().plan(*facts, **more)


PLANS = 3
"""How often an attempt plans: for itself, for the checks of programs, for the start."""


@pytest.mark.parametrize("plans", range(3))
@pytest.mark.parametrize(
    ("error", "reference", "status"),
    [
        (RuntimeError("oh"), "bug", 70),
        (UsageError("gpu-b has 1 GPU"), "usage", 3),  # no longer a usage error: something was started
        (RunDirectoryError("no space left"), "run-directory", 3),
        (OSError(28, "No space left on device"), "bug", 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_in_the_second_attempt_ends_the_run_with_a_report(
    tmp_path: Path, plans: int, error: Exception, reference: str, status: int
) -> None:
    run = FakeRun(tmp_path / "run", failing(1), restarting())
    run.planner = BadPlanner(**vars(run.planner), left=[PLANS + plans], error=error)
    with pytest.raises(ShownError) as shown:
        run.run()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert shown.value.exit_status == report["exit_status"] == status
    assert (report["outcome"], report["verdict"]["reference"]) == ("failed", reference)
    told = [(attempt["attempt"], attempt["verdict"]["reference"]) for attempt in report["attempts"]]
    assert told == [(1, "task-killed"), (2, reference)][: 2 if plans else 1]
    assert run.said.count(f"[{reference}]") == 1
    assert f"exit status {status}\nLogs: {tmp_path}/run · page: distlaunch report" in run.said
    for node in ("gpu-a", "gpu-b"):
        assert run.nodes.kinds_of(node)[-1] == "Goodbye"  # ends all tasks on the node


def test_an_error_before_the_first_start_is_raised_unchanged_without_a_report(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.planner = BadPlanner(**vars(run.planner), left=[PLANS - 1], error=UsageError("gpu-b has 1 GPU"))
    with pytest.raises(UsageError, match="gpu-b has 1 GPU"):
        run.run()
    assert not (tmp_path / "run" / "report.json").exists()  # the caller writes it
    assert run.nodes.kinds_of("gpu-b")[-1] == "Goodbye"
    assert run.said == ""


def test_a_bug_after_the_first_start_ends_the_run_with_a_report(tmp_path: Path) -> None:
    def fail(agent: FakeAgent) -> bool:
        raise KeyError("oh")

    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, fail)], restarting(5))
    with pytest.raises(ShownError) as shown:
        run.run()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert shown.value.exit_status == report["exit_status"] == 70
    assert [attempt["verdict"]["reference"] for attempt in report["attempts"]] == ["bug"]
    assert "end not observed" in run.said
    assert "Error: a bug in distlaunch: KeyError('oh') [bug]" in run.said


def test_a_bug_is_shown_with_the_last_ignored_events_of_a_node(tmp_path: Path) -> None:
    def fail(agent: FakeAgent) -> bool:
        raise KeyError("oh")

    early = [Empty(1, left_behind=number, killed=0) for number in range(25)]  # nothing has ended yet
    run = FakeRun(tmp_path / "run", [At(Phase.FORMING, say(*early)), At(Phase.RUNNING, fail)])
    with pytest.raises(ShownError):
        run.run()
    shown = [line.strip() for line in run.said.splitlines() if "ignored from" in line]
    assert shown[0] == "ignored from gpu-b: NodeEmpty(node='gpu-b', left_behind=5, killed=0)"
    assert len(shown) == 20


def fill_disk(patch: pytest.MonkeyPatch, path: Path) -> None:
    """From now on, the disk is full when this file is written."""

    def write(target: Path, text: str, mode: int = 0o600) -> None:
        if target == path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace_text(target, text, mode)

    patch.setattr("launcher.rundir.directory.replace_text", write)


@linux
def test_a_full_disk_at_the_second_plan_ends_the_run_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(agent: FakeAgent) -> bool:
        fill_disk(monkeypatch, tmp_path / "run" / "plan.json")
        return True

    run = FakeRun(tmp_path / "run", [*failing(1), At(Phase.STOPPING, fill)], restarting())
    with pytest.raises(ShownError) as shown:
        run.run()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert shown.value.exit_status == report["exit_status"] == 3
    assert [attempt["verdict"]["reference"] for attempt in report["attempts"]] == ["task-killed", "run-directory"]
    assert f"Error: cannot write {tmp_path}/run/plan.json: No space left on device [run-directory]" in run.said
    assert "  2 attempts; before the last one:\n    1: worker:1 on gpu-b was killed by SIGKILL" in run.said


@linux
def test_a_report_that_cannot_be_written_does_not_change_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path / "run")
    fill_disk(monkeypatch, tmp_path / "run" / "report.json")
    report = run.run()
    assert (report.outcome, report.exit_status) == ("succeeded", 0)
    assert "No space left on device [run-directory]\n  the run has ended; only its report is missing" in run.said
    assert f"Logs: {tmp_path}/run" in run.said


def test_a_broken_output_pipe_ends_a_run_with_status_141(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", failing(1), restarting())

    def until_broken(agent: FakeAgent) -> bool:
        run.sink.broken = True
        run.console.note("nobody reads this")
        while not run.console.broken:
            pass
        return True

    run.nodes.script = [*run.nodes.script, At(Phase.RUNNING, until_broken, attempt=2)]
    report = run.run()
    assert (report.outcome, report.exit_status, len(report.attempts)) == ("interrupted", 141, 2)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["exit_status"] == 141


# --- the report ---


def test_the_report_records_task_times_by_the_controller_clock(tmp_path: Path) -> None:
    script: Script = [
        Exit("worker:1", TaskExit(0), 30.0),
        Exit("worker:0", TaskExit(1), 40.0, finished=True),
        Steps("worker:0", 1, 50),
    ]
    run = FakeRun(tmp_path / "run", script, clock_offsets={"gpu-b": 3600.0})
    report = run.run()
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report.model_dump(mode="json")
    assert (report.run_id, report.name, report.directory) == ("run", run.spec.name, f"{tmp_path}/run")
    [attempt] = report.attempts
    first, second = attempt.tasks
    assert report.started <= attempt.started < first.started <= first.port_opened  # type: ignore[operator]
    assert second.ended == pytest.approx(BEGAN + 1030, abs=0.1)
    assert (first.exit_code, first.finished, first.progress and first.progress.step) == (1, True, 50)
    assert attempt.ended <= report.ended == pytest.approx(BEGAN + 1040, abs=GRACE_S)
    assert report.versions["tensorflow"] == "2.21.0"


def test_injected_faults_are_reported_and_not_injected_again(tmp_path: Path) -> None:
    script: Script = [
        Steps("worker:1", 1, 30, injected=("kill@step=30",)),
        Steps("worker:0", 1, 29),
        *failing(1),
        Steps("worker:0", 28, 60, attempt=2),
    ]
    faults = ["kill:worker:1@step=30", "kill:worker:0@step=900"]
    run = FakeRun(tmp_path / "run", script, restarting(), faults=faults)
    report = run.run()
    starts = {
        (node, order.attempt): [str(injection) for task in order.tasks for injection in task.injections]
        for node, order in run.nodes.orders
        if isinstance(order, Start)
    }
    assert starts == {
        ("gpu-a", 1): ["kill@step=900"],
        ("gpu-b", 1): ["kill@step=30"],
        ("gpu-a", 2): ["kill@step=900"],
        ("gpu-b", 2): [],
    }
    assert [(fault.fault, fault.attempt) for fault in report.chaos] == [(faults[0], 1), (faults[1], None)]
