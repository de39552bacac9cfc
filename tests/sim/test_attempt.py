"""One attempt on nodes that follow a script: the orders to each node in each phase, and how the attempt ends."""

from __future__ import annotations

import json
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.gang.state import Phase, Reason
from launcher.report.run_events import Record, parse_record
from launcher.tasks import TaskId
from tests.harness.polling import eventually
from tests.sim.nodes import (
    ANSWER_S,
    KILL,
    LIFE_S,
    TERM,
    At,
    Deed,
    Exit,
    FakeAgent,
    FakeRun,
    Script,
    Shows,
    Steps,
    both,
    drop,
    fall_silent,
    ignore_term,
    lose,
    refuse,
    say,
    say_nothing,
    take_interrupt,
    user,
)
from worker_entry.protocol.messages import CHILD, Broken, Fetch, Noted
from worker_entry.protocol.orders import Dial, Hello, Preload, Prepare, ShowStacks, Start, Stop
from worker_entry.protocol.values import Activity, Problem, TaskExit

WORKER_0, WORKER_1 = TaskId("worker", 0), TaskId("worker", 1)
SYNC = {"sync": {"path": "project", "to": "~/project"}}
PARAMETER_SERVER = {
    "strategy": "parameter_server",
    "nodes": [{"host": "gpu-a", "tasks": {"chief": 1, "ps": 1}}, {"host": "gpu-b", "tasks": {"worker": 2}}],
}
THREE = {"nodes": [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c"}]}

BEFORE_START = [Phase.CONNECTING, Phase.CLAIMING, Phase.SYNCING, Phase.PREPARING, Phase.CHECKING]
PHASES = [*BEFORE_START, Phase.FORMING, Phase.RUNNING]
"""All phases of an attempt before it is stopped."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Makes a folder to send to the nodes; returns the path of the run's folder."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print('hello')\n")
    return tmp_path / "run"


def whole(folder: Path, *script: At | Exit, **more: Any) -> FakeRun:
    """An attempt that goes through every phase."""
    spec = {**SYNC, "wait_gpus_s": 0, **more.pop("spec", {})}
    gpus = {"gpu-a": {"0": ""}, "gpu-b": {"0": ""}}
    return FakeRun(folder, script, spec, checks=True, gpus=gpus, **more)


def test_all_nodes_go_through_the_phases_of_an_attempt_together(project: Path) -> None:
    run = whole(project)
    state = run.attempt()
    assert (state.phase, state.reason) == (Phase.FINISHED, Reason.SUCCEEDED)
    for node in ("gpu-a", "gpu-b"):
        assert run.nodes.kinds_of(node) == [
            *("Hello", "ClaimGpus", "Offer", "Piece", "Prepare", "Inspect", "Dial", "Start", "Stop", "Goodbye")
        ]
    order = [type(order) for _, order in run.nodes.orders]
    for earlier, later in ((Hello, Prepare), (Prepare, Dial), (Dial, Start), (Start, Stop)):  # no node gets ahead
        assert max(n for n, kind in enumerate(order) if kind is earlier) < order.index(later)
    asked = [order for _, order in run.nodes.orders if isinstance(order, (Prepare, Dial))]
    assert {order.nonce for order in asked} == {"nonce"}  # a port answers with it until the program opens the port
    assert [state.exits[task].exit for task in (WORKER_0, WORKER_1)] == [TaskExit(0)] * 2


# --- a node is lost ---


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_a_lost_node_ends_the_attempt_in_every_phase(project: Path, phase: Phase) -> None:
    run = whole(project, At(phase, lose("cable pulled")), Exit("worker:0", TaskExit(0), 1e6))
    state = run.attempt()
    assert (state.phase, state.reason, dict(state.lost)) == (
        Phase.FINISHED,
        Reason.NODE_LOST,
        {"gpu-b": "cable pulled"},
    )
    assert state.empty.keys() == {"gpu-a"}
    assert run.nodes.kinds_of("gpu-a").count("Stop") == 1
    started = WORKER_0 in state.started
    assert started == (phase not in BEFORE_START)
    assert "Stop" not in run.nodes.kinds_of("gpu-b")
    assert {task: exited.exit for task, exited in state.exits.items()} == ({WORKER_0: TERM} if started else {})
    assert run.timing.monotonic() - 1000 < 12  # the attempt did not wait for any timeout


@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_a_silent_node_is_lost_when_its_lease_expires(project: Path, phase: Phase) -> None:
    run = whole(project, At(phase, fall_silent), Exit("worker:0", TaskExit(0), 1e6))
    state = run.attempt()
    assert state.reason is Reason.NODE_LOST
    assert state.lost == {"gpu-b": "nothing came, and not reconnected within 60 s"}
    assert "node gpu-b: nothing came; its tasks continue; reconnecting for up to 60 s" in run.said
    assert 60 < run.timing.monotonic() - 1000 < 75


def test_a_node_lost_while_stopping_does_not_change_why_the_attempt_ended(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:0", KILL), At(Phase.STOPPING, lose("cable pulled"))])
    state = run.attempt()
    assert (state.reason, dict(state.lost)) == (Reason.TASK_FAILED, {"gpu-b": "cable pulled"})
    assert state.empty.keys() == {"gpu-a"}


def test_a_node_that_never_confirms_its_processes_ended_is_lost_after_a_margin(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:0", KILL), At(Phase.STOPPING, say_nothing)])
    state = run.attempt()
    assert state.lost == {"gpu-b": "did not report that all of its processes have ended"}
    assert 50 < run.timing.monotonic() - 1000 < 55  # failure after 20 s, 1 s of grace, 30 s of margin


def test_all_nodes_that_cannot_be_connected_are_reported_as_lost(tmp_path: Path) -> None:
    errors = {"gpu-b": FileNotFoundError(2, "No such file or directory", "ssh")}
    run = FakeRun(tmp_path / "run", [At(Phase.CONNECTING, lose("no route"), "gpu-c")], THREE, errors=errors)
    state = run.attempt()
    assert state.lost == {"gpu-b": "cannot start ssh: No such file or directory", "gpu-c": "no route"}
    assert run.nodes.kinds_of("gpu-a") == ["Hello", "Stop", "Goodbye"]


def test_an_attempt_survives_a_dropped_connection_and_reports_the_reconnect(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, drop(7.5))])
    assert run.attempt().reason is Reason.SUCCEEDED
    assert "node gpu-b: the connection broke; its tasks continue; reconnecting for up to 60 s" in run.said
    assert "node gpu-b: reconnected after 7.5 s; nothing was lost" in run.said


# --- the user stops the attempt ---


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_a_signal_stops_all_nodes_in_every_phase(project: Path, phase: Phase, signum: signal.Signals) -> None:
    run = whole(project, At(phase, user(signum)))
    state = run.attempt()
    assert (state.phase, state.reason, state.signal) == (Phase.FINISHED, Reason.INTERRUPTED, signum)
    assert state.lost == {}
    assert bool(state.started) == (phase not in BEFORE_START)
    assert state.exits.keys() == state.started.keys()
    assert run.nodes.kinds_of("gpu-a")[-1] == "Goodbye"
    if phase is not Phase.CONNECTING:  # before an agent answers, Goodbye is enough
        by_hand = signum == signal.SIGINT
        said = "Interrupting all tasks, 10 s grace; Ctrl-C again kills them"
        assert run.said.splitlines()[-1] == (said if by_hand else f"{signum.name}: stopping all tasks, 10 s grace")
        for node in ("gpu-a", "gpu-b"):
            stops = [order for order in run.nodes.orders_of(node) if isinstance(order, Stop)]
            assert stops == [Stop(10.0, interrupts=by_hand)]
            assert node in state.empty


@pytest.mark.parametrize("more", [(), (signal.SIGTERM,)])  # `timeout` and a closed window send their signal twice
@pytest.mark.parametrize(
    ("first", "do", "stops", "seconds"),
    [
        (signal.SIGTERM, ignore_term, [10.0], 10.0),
        (signal.SIGINT, take_interrupt, [10.0], 10.0),
        (signal.SIGINT, ignore_term, [10.0, 1.0], 4.0),  # its main thread may be in C++
    ],
)
def test_tasks_that_do_not_end_are_killed_after_the_grace_time(
    tmp_path: Path, first: int, more: tuple[int, ...], do: Deed, stops: list[float], seconds: float
) -> None:
    check_kill(tmp_path, first, more, do, stops, seconds)


@pytest.mark.parametrize("do", [ignore_term, take_interrupt])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_stop_signal_kills_tasks_that_have_not_ended(tmp_path: Path, first: int, do: Deed) -> None:
    check_kill(tmp_path, first, (signal.SIGINT,), do, [10.0, 0.0], 0.0)


def check_kill(tmp_path: Path, first: int, more: tuple[int, ...], do: Deed, stops: list[float], seconds: float) -> None:
    script = [At(Phase.RUNNING, user(first)), At(Phase.STOPPING, do)]
    run = FakeRun(tmp_path / "run", script)
    for signum in more:
        run.timing.after(10.5, partial(signal.raise_signal, signum))
    state = run.attempt()
    for node, graces in (("gpu-a", [10.0]), ("gpu-b", stops)):  # an empty node is not asked again
        assert [order.grace_s for order in run.nodes.orders_of(node) if isinstance(order, Stop)] == graces
    assert [state.exits[task].exit for task in (WORKER_0, WORKER_1)] == [TaskExit(signal=first), KILL]
    assert run.timing.monotonic() - 1010 == pytest.approx(seconds + 0.5 * bool(not seconds), abs=0.6)
    assert ("Killing all tasks" in run.said) == (signal.SIGINT in more)


def test_an_interrupted_attempt_waits_only_five_seconds_for_a_silent_node(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, both(fall_silent, user(signal.SIGTERM)))])
    state = run.attempt()
    assert (state.reason, list(state.lost)) == (Reason.INTERRUPTED, ["gpu-b"])
    assert "its agent did not answer for 5 s" in state.lost["gpu-b"]
    assert 5 < run.timing.monotonic() - 1010 < 6


def test_a_broken_output_pipe_interrupts_the_attempt_once(tmp_path: Path) -> None:
    def until_seen(_agent: FakeAgent) -> bool:
        def seen() -> None:
            assert run.console.broken

        eventually(seen)
        return True

    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, until_seen), At(Phase.STOPPING, ignore_term)])
    run.sink.broken = True
    state = run.attempt()
    assert (state.reason, state.signal) == (Reason.INTERRUPTED, signal.SIGPIPE)
    assert [order for order in run.nodes.orders_of("gpu-b") if isinstance(order, Stop)] == [Stop(10.0)]


# --- a node refuses ---


@pytest.mark.parametrize("phase", PHASES[:-1], ids=str)
def test_a_refusal_by_a_node_ends_the_attempt_in_every_phase_before_running(project: Path, phase: Phase) -> None:
    run = whole(project, At(phase, refuse("no-program", "no train.py")))
    state = run.attempt()
    assert state.reason is Reason.REFUSED
    assert [(refusal.node, refusal.problems[0].message) for refusal in state.refusals] == [("gpu-b", "no train.py")]
    assert bool(state.started) == (phase is Phase.FORMING)


def test_the_attempt_records_the_refusals_of_all_nodes(tmp_path: Path) -> None:
    script = [At(Phase.PREPARING, refuse("no-program"), node) for node in ("gpu-a", "gpu-b")]
    state = FakeRun(tmp_path / "run", script).attempt()
    assert {refusal.node for refusal in state.refusals} == {"gpu-a", "gpu-b"}


def test_an_agent_that_reports_a_fatal_problem_ends_a_running_attempt(tmp_path: Path) -> None:
    problem = Problem("disk-full", "no space left")
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, say(Broken(problem)))])
    state = run.attempt()
    assert (state.reason, state.refusals[0].problems) == (Reason.REFUSED, (problem,))
    assert {exited.exit for exited in state.exits.values()} == {TERM}


# --- timeouts ---


@pytest.mark.parametrize("phase", [*BEFORE_START, Phase.FORMING], ids=str)
def test_a_node_that_does_not_answer_ends_the_attempt_at_the_start_timeout(project: Path, phase: Phase) -> None:
    spec = {"timeouts": {"start_s": 30}}
    run = whole(project, At(phase, say_nothing), spec=spec)
    state = run.attempt()
    assert (state.reason, state.lost) == (Reason.START_TIMEOUT, {})
    assert re.search(rf"^{phase.value.capitalize()}, \d+ s: waiting for .*gpu-b", run.said, re.MULTILINE)
    assert run.nodes.kinds_of("gpu-b")[-1] == "Goodbye"
    assert 30 < run.timing.monotonic() - 1000 < 42


def test_stacks_of_tasks_are_collected_before_a_start_timeout_stops_them(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.FORMING, say_nothing)], {"timeouts": {"start_s": 30}})
    state = run.attempt()
    for node in ("gpu-a", "gpu-b"):
        assert run.nodes.kinds_of(node) == ["Hello", "Prepare", "Start", "ShowStacks", "Stop", "Goodbye"]
    assert state.stacks == {WORKER_0: CHILD, WORKER_1: CHILD}
    assert (tmp_path / "run" / "stacks.txt").read_text() == "worker:0, worker:1 have no Python stack to show\n"


def test_a_start_timeout_does_not_wait_for_missing_stacks(tmp_path: Path) -> None:
    def answer_only_beats(agent: FakeAgent) -> bool:
        setattr(agent, "answer", lambda *_: None)  # noqa: B010 - it is a method
        return False

    script = [At(Phase.FORMING, answer_only_beats)]
    run = FakeRun(tmp_path / "run", script, {"timeouts": {"start_s": 30, "lease_s": 300}})
    state = run.attempt()
    assert state.reason is Reason.START_TIMEOUT
    assert state.stacks == {WORKER_0: CHILD, WORKER_1: ""}


# --- tasks at work, and tasks that wait ---

AT_WORK = Activity(idle_s=1.0)


def test_a_task_at_work_after_the_others_ended_is_reported_and_not_stopped(tmp_path: Path) -> None:
    script: Script = [Exit("worker:0", TaskExit(0), 20.0), Shows("worker:1", AT_WORK)]
    run = FakeRun(tmp_path / "run", script, {"timeouts": {"drain_s": 30}})
    state = run.attempt()
    assert state.reason is Reason.SUCCEEDED
    assert state.exits[WORKER_1].exit == TaskExit(0)
    assert "worker:1 has been at work for " in run.said


def test_an_idle_task_is_stopped_after_a_warning_when_the_others_have_ended(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:0", TaskExit(0), 20.0)], {"timeouts": {"drain_s": 30}})
    report = run.run()
    verdict = report.attempts[0].verdict
    assert (report.outcome, verdict.reference) == ("failed", "drain-timeout")
    assert verdict.hint is not None
    assert "timeouts.drain_s" in verdict.hint
    assert "worker:1 is still running, the others have ended; stopping in 15 s unless at work then" in run.said
    assert 50 < run.timing.monotonic() - 1000 < 52


def test_the_drain_timeout_counts_from_the_moment_a_task_becomes_idle(tmp_path: Path) -> None:
    shown = (Shows("worker:1", AT_WORK), Shows("worker:1", after_s=60.0))
    script: Script = [Exit("worker:0", TaskExit(0), 20.0), *shown, Exit("worker:1", TaskExit(0), 1e6)]
    run = FakeRun(tmp_path / "run", script, {"timeouts": {"drain_s": 30}})
    state = run.attempt()
    assert (state.reason, state.exits[WORKER_1].exit) == (Reason.DRAIN_TIMEOUT, TERM)
    assert 80 < run.timing.monotonic() - 1000 < 82


@pytest.mark.parametrize("activity", [Activity(), AT_WORK])
def test_a_cluster_without_progress_is_stopped_at_the_configured_stall_limit(
    tmp_path: Path, activity: Activity
) -> None:
    """Even if a task is at work: the user's limit is exact."""
    run = FakeRun(tmp_path / "run", [Shows("worker:1", activity)], {"timeouts": {"stall_s": 20}})
    report = run.run()
    verdict = report.attempts[0].verdict
    assert (report.outcome, verdict.reference) == ("failed", "stalled")
    assert verdict.message == "no sign of progress for 20 s"
    assert 20 < run.timing.monotonic() - 1000 < 24


STUCK = Activity(idle_s=60.0, waits=True, is_stuck=True)


@pytest.mark.parametrize(("others", "stopped_s"), [(STUCK, 18.0), (Activity(idle_s=60.0, waits=True), 128.0)])
def test_a_cluster_that_hangs_is_stopped_soon_if_only_tasks_could_wake_each_other(
    tmp_path: Path, others: Activity, stopped_s: float
) -> None:
    steps = [Steps(task, 1, 50, 5.0, p99_s=0.1) for task in ("worker:0", "worker:1")]
    never = [Exit(task, TaskExit(0), 1e6) for task in ("worker:0", "worker:1")]
    run = FakeRun(tmp_path / "run", [*steps, *never, Shows("worker:0", STUCK), Shows("worker:1", others)])
    report = run.run()
    assert (report.outcome, report.attempts[0].verdict.reference) == ("failed", "stalled")
    assert stopped_s < run.timing.monotonic() - 1000 < stopped_s + 5
    assert run.said.count("and all tasks wait; looking at them again in 4 s\n") == 1


def test_looks_at_a_healthy_cluster_are_neither_shown_nor_recorded(tmp_path: Path) -> None:
    steps = [
        Steps(task, 1, 50 + after, 5.0 + after, p99_s=0.1) for after in (0, 100) for task in ("worker:0", "worker:1")
    ]
    ends = [Exit(task, TaskExit(0), 110.0) for task in ("worker:0", "worker:1")]
    shown = [Shows(task, AT_WORK) for task in ("worker:0", "worker:1")]
    run = FakeRun(tmp_path / "run", [*steps, *shown, *ends])
    report = run.run()
    assert report.outcome == "succeeded"
    asked = [order for _, order in run.nodes.orders if isinstance(order, ShowStacks)]
    assert len(asked) == 6  # of two nodes, 10 s, 40 s and 70 s after the last step
    assert "all tasks wait" not in run.said
    assert "progress again" not in run.said
    assert b"stacks-received" not in (tmp_path / "run" / "events.jsonl").read_bytes()


# --- the checks ---


def test_no_task_starts_if_a_check_finds_an_error(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", checks=True, refused={"gpu-b": ["worker:0"]})
    state = run.attempt()
    assert state.reason is Reason.REFUSED
    [problem] = state.refusals[0].problems
    assert (problem.reference, problem.message) == (
        "cannot-reach",
        "gpu-b cannot reach worker:0 on gpu-a at gpu-a:20500 (10.0.0.1): connection refused",
    )
    assert "Start" not in run.nodes.kinds_of("gpu-a") + run.nodes.kinds_of("gpu-b")


def test_a_wrong_node_clock_causes_a_warning_and_the_attempt_continues(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", checks=True, clock_offsets={"gpu-b": 90.0})
    assert run.attempt().reason is Reason.SUCCEEDED
    assert run.said.count("Warning: the clock of gpu-b is 90.0 s ahead of ours") == 1


def test_stack_requests_during_the_checks_do_not_repeat_findings(tmp_path: Path) -> None:
    def ask(agent: FakeAgent) -> bool:
        agent.later(2 * ANSWER_S, lambda: user(*[signal.SIGUSR1] * 3)(agent))
        return True

    run = FakeRun(tmp_path / "run", [At(Phase.CHECKING, ask)], checks=True, clock_offsets={"gpu-b": 90.0})
    assert run.attempt().reason is Reason.SUCCEEDED
    assert run.said.count("Warning: the clock of gpu-b") == 1


def test_nodes_are_not_checked_if_checks_are_disabled(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", refused={"gpu-b": ["worker:0"]}, clock_offsets={"gpu-b": 90.0})
    assert run.attempt().reason is Reason.SUCCEEDED
    assert run.nodes.kinds_of("gpu-b") == ["Hello", "Prepare", "Start", "Stop", "Goodbye"]
    assert "Warning" not in run.said


def test_only_checks_mode_checks_all_usable_nodes_and_starts_nothing(tmp_path: Path) -> None:
    script = [At(Phase.CONNECTING, lose("no route")), At(Phase.PREPARING, refuse("no-program"), "gpu-c")]
    spec = {"nodes": [*THREE["nodes"], {"host": "gpu-d"}], "preload": True}
    run = FakeRun(tmp_path / "run", script, spec, checks=True, only_checks=True, refused={"gpu-d": ["worker:0"]})
    state, preflight = run.check()
    assert (state.reason, state.started) == (Reason.CHECKED, {})
    assert (list(state.lost), [refusal.node for refusal in state.refusals]) == (["gpu-b"], ["gpu-c"])
    assert "Dial" in run.nodes.kinds_of("gpu-d")
    assert [finding.reference for finding in preflight.findings()] == ["cannot-reach"]
    assert not {"Start", "Preload"} & {type(order).__name__ for _, order in run.nodes.orders}
    assert run.nodes.kinds_of("gpu-a")[-1] == "Goodbye"


def test_only_checks_mode_can_be_interrupted(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.CHECKING, user(signal.SIGINT))], checks=True, only_checks=True)
    state, _ = run.check()
    assert (state.reason, state.signal) == (Reason.INTERRUPTED, signal.SIGINT)
    assert run.said == "Stopping the checks"


def test_the_plan_uses_the_address_that_all_nodes_can_reach(tmp_path: Path) -> None:
    spec = {"nodes": [{"host": "gpu-a", "addresses": ["10.0.0.1", "10.1.0.1"]}, {"host": "gpu-b"}]}
    run = FakeRun(tmp_path / "run", spec=spec, checks=True, refused={"gpu-b": ["10.0.0.1"]})
    assert run.attempt().reason is Reason.SUCCEEDED
    [dial] = [order for order in run.nodes.orders_of("gpu-b") if isinstance(order, Dial)]
    assert [(target.task, target.host) for target in dial.targets] == [
        ("worker:0", "10.0.0.1"),
        ("worker:0", "10.1.0.1"),
        ("worker:1", "gpu-b"),
    ]
    [start] = [order for order in run.nodes.orders_of("gpu-b") if isinstance(order, Start)]
    assert start.cluster == {"worker": ["10.1.0.1:20500", "gpu-b:20500"]}
    assert "gpu-a is reached at 10.1.0.1" in run.said


# --- the program's folder ---


def test_the_program_folder_is_sent_only_to_remote_nodes(project: Path) -> None:
    spec = {"nodes": [{"host": "local", "address": "10.0.0.9"}, {"host": "gpu-b"}]}
    run = whole(project, spec=spec)
    assert run.attempt().reason is Reason.SUCCEEDED
    assert "Offer" not in run.nodes.kinds_of("local")
    assert run.nodes.fetched == [b"print('hello')\n"]
    assert "Sent 1 file (15 B) to gpu-b" in run.said


def test_a_node_that_fetches_a_file_outside_the_offer_is_lost(project: Path) -> None:
    run = whole(project, At(Phase.SYNCING, say(Fetch(7, 0, 1, 1), instead=True)))
    state = run.attempt()
    assert (state.reason, dict(state.lost)) == (
        Reason.NODE_LOST,
        {"gpu-b": "the agent sent a Fetch outside the offer"},
    )


# --- the user asks what the tasks are doing ---


def test_stacks_requested_by_the_user_are_shown_without_disturbing_the_attempt(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, user(signal.SIGUSR1, signal.SIGUSR1))])
    state = run.attempt()
    assert (state.reason, state.stacks) == (Reason.SUCCEEDED, {})
    for node in ("gpu-a", "gpu-b"):
        assert run.nodes.kinds_of(node).count("ShowStacks") == 1  # a node that has not answered yet is not asked again
    assert run.said.count("worker:0, worker:1 have no Python stack to show") == 1
    assert (tmp_path / "run" / "stacks.txt").exists()


def test_stacks_collected_at_a_stall_are_not_shown_on_the_console(tmp_path: Path) -> None:
    tasks = (Exit(f"worker:{index}", TaskExit(0), 1e6) for index in (0, 1))
    script: Script = [At(Phase.RUNNING, user(signal.SIGUSR1)), *tasks]
    run = FakeRun(tmp_path / "run", script, {"timeouts": {"stall_s": 60}})
    assert run.attempt().reason is Reason.STALLED
    assert run.nodes.kinds_of("gpu-b").count("ShowStacks") == 2
    assert run.said.count("have no Python stack to show") == 1


def test_a_stack_request_before_the_start_reports_that_no_task_runs(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.PREPARING, user(signal.SIGUSR1))])
    assert run.attempt().reason is Reason.SUCCEEDED
    assert "No task is running" in run.said


def test_stacks_that_cannot_be_written_to_a_file_are_still_shown(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, user(signal.SIGUSR1))])
    (tmp_path / "run" / "stacks.txt").mkdir()
    assert run.attempt().reason is Reason.SUCCEEDED
    assert f"Warning: cannot write {tmp_path}/run/stacks.txt: Is a directory" in run.said
    assert "have no Python stack to show" in run.said


# --- a task is restarted alone ---

CHAOS = ["kill:worker:0@step=3", "kill:worker:1@step=9"]


def restarted(folder: Path, *script: Exit, limit: int = 3) -> tuple[FakeRun, list[Start]]:
    spec = {**PARAMETER_SERVER, "restart": {"max_worker_restarts": limit}}
    run = FakeRun(folder, script, spec, faults=CHAOS)
    run.attempt()
    return run, [order for order in run.nodes.orders_of("gpu-b") if isinstance(order, Start)]


def test_a_worker_of_a_parameter_server_cluster_is_restarted_alone(tmp_path: Path) -> None:
    run, (first, again) = restarted(tmp_path / "run", Exit("worker:0", KILL))
    assert [task.task for task in first.tasks] == ["worker:0", "worker:1"]
    assert [task.task for task in again.tasks] == ["worker:0"]
    assert (again.attempt, again.cluster) == (1, first.cluster)
    assert run.nodes.kinds_of("gpu-a") == ["Hello", "Prepare", "Start", "Stop", "Goodbye"]
    assert "worker:0 ended with SIGKILL (signal 9); restarting it while the others continue" in run.said
    assert run.timing.monotonic() - 1000 > LIFE_S  # the chief ran to its end


def test_a_fault_is_not_injected_again_into_a_restarted_task(tmp_path: Path) -> None:
    _, (first, *again) = restarted(tmp_path / "run", Exit("worker:0", KILL), Exit("worker:1", KILL, 40.0))
    injected = [str(injection) for task in first.tasks for injection in task.injections]
    assert injected == ["kill@step=3", "kill@step=9"]
    assert [(task.task, task.injections) for order in again for task in order.tasks] == [
        ("worker:0", []),
        ("worker:1", []),
    ]


def test_a_worker_that_exceeds_its_restart_limit_ends_the_attempt(tmp_path: Path) -> None:
    ends = [Exit("worker:1", KILL, start=start) for start in (1, 2, 3)]
    run, starts = restarted(tmp_path / "run", *ends, limit=2)
    assert [len(start.tasks) for start in starts] == [2, 1, 1]
    assert "worker:1 ended with SIGKILL (signal 9); stopping chief:0, ps:0, worker:0" in run.said


# --- notes and files ---


def test_notes_of_remote_agents_are_shown_with_the_node_name(tmp_path: Path) -> None:
    spec = {"nodes": [{"host": "local", "address": "10.0.0.9"}, {"host": "gpu-b"}]}
    script = [At(Phase.RUNNING, say(Noted(f"news of {node}")), node) for node in ("local", "gpu-b")]
    run = FakeRun(tmp_path / "run", script, spec)
    run.attempt()
    assert {"news of local", "node gpu-b: news of gpu-b"} < {*run.said.splitlines()}


def test_times_are_recorded_by_the_controller_clock_despite_wrong_node_clocks(tmp_path: Path) -> None:
    state = FakeRun(tmp_path / "run", clock_offsets={"gpu-b": 3600.0}).attempt()
    assert state.exits[WORKER_0].time == pytest.approx(state.exits[WORKER_1].time, abs=0.1)
    assert state.started[WORKER_0].time == pytest.approx(state.started[WORKER_1].time, abs=0.1)


def test_the_written_plan_has_the_ports_that_the_nodes_reserved(tmp_path: Path) -> None:
    spec = {"nodes": [{"host": "gpu-a", "tasks": {"worker": 2}}, {"host": "gpu-b"}]}
    run = FakeRun(tmp_path / "run", spec=spec)
    run.attempt()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    [start] = [order for order in run.nodes.orders_of("gpu-b") if isinstance(order, Start)]
    assert start.cluster == {"worker": ["gpu-a:20500", "gpu-a:20501", "gpu-b:20500"]}
    assert [f"{task['address']}:{task['port']}" for task in plan["tasks"]] == start.cluster["worker"]
    [task] = start.tasks
    assert (task.env["DISTLAUNCH_RUN_ID"], task.env["DISTLAUNCH_ATTEMPT"]) == ("run", "1")
    assert task.coordination_timeout_s == run.spec.timeouts.lease_s


def test_output_of_workers_is_shown_and_output_of_tensorboard_only_logged(tmp_path: Path) -> None:
    spec = {"tensorboard": True, "log_directory": "/logs"}
    script = [
        Exit("worker:1", TaskExit(0), log="epoch 1\n"),
        Exit("tensorboard:0", TaskExit(1), log="no data\n"),
    ]
    run = FakeRun(tmp_path / "run", script, spec)
    assert run.attempt().reason is Reason.SUCCEEDED
    assert run.output == "worker:1 │ epoch 1\n"
    assert (tmp_path / "run" / "attempt-1" / "tensorboard-0.log").read_text() == "no data\n"


@pytest.mark.parametrize(
    ("restart", "more", "keep"),
    [
        ({}, {}, False),
        ({"max_restarts": 1}, {}, True),
        ({}, PARAMETER_SERVER, True),
        ({"max_worker_restarts": 0}, PARAMETER_SERVER, False),
    ],
)
def test_preloaded_forkservers_are_kept_only_if_restarts_are_possible(
    tmp_path: Path, restart: dict[str, int], more: dict[str, Any], keep: bool
) -> None:
    run = FakeRun(tmp_path / "run", spec={**more, "preload": True, "restart": restart})
    run.attempt()
    for node in ("gpu-a", "gpu-b"):
        _, preload, *_ = run.nodes.orders_of(node)
        assert isinstance(preload, Preload)
        assert preload.keep is keep


def test_the_journal_records_increasing_frame_numbers_for_each_node(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [Exit("worker:0", TaskExit(1), 5.0)])
    run.attempt()
    records = [*filter(None, map(parse_record, run.files.events.read_bytes().splitlines()))]
    for node in ("gpu-a", "gpu-b"):
        of_node: list[Record] = [record for record in records if record.node == node]
        assert [type(record.event).__name__ for record in of_node][:2] == ["NodeReady", "NodePrepared"]
        frames = [record.frame for record in of_node]
        assert frames[0] == 1
        assert frames == sorted(set(frames))
