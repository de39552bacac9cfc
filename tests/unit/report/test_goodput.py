"""Goodput: each second of a run is counted once, and as the right kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.events import TaskExited, TaskListening, TaskReported, TaskStarted
from launcher.report.goodput import KINDS, Goodput, make_goodput, render_goodput
from launcher.report.goodput_count import IDLE, LIMIT, GoodputCount, TrainingLine, TrainingPosition
from launcher.report.models import AttemptReport
from launcher.report.run_events import (
    AttemptEnded,
    Ended,
    Record,
    RunEvent,
    RunStarted,
    State,
)
from launcher.report.samples import ProgressSample
from launcher.report.state_names import StateName
from launcher.tasks import TENSORBOARD, TaskId
from launcher.verdict.models import Verdict
from tests.harness.builders.goodput import (
    BEGAN,
    CHIEF,
    MOMENTS,
    W0,
    W1,
    TimedEvent,
    progresses,
    seconds_of,
    steps,
)
from worker_entry.protocol.values import CrashRecord, Progress, TaskExit

History = Iterable[TimedEvent]


def to_state(at: float, state: StateName, attempt: int = 1) -> TimedEvent:
    return TimedEvent(at, State(state), attempt)


def trained(
    first_at: float, last_at: float, first: int = 1, attempt: int = 1, epoch_steps: int = 0, **more: Any
) -> list[TimedEvent]:
    """One step per second, each with a report; with `epoch_steps`, in epochs of that many steps."""
    first_epoch = more.pop("first_epoch", 1 if epoch_steps else None)
    told = []
    for number in range(int(last_at - first_at) + 1):
        epoch = first_epoch + number // epoch_steps if epoch_steps else None
        told.append(
            steps(
                first_at + number,
                first + number,
                first,
                first_at,
                attempt,
                epoch=epoch,
                first_epoch=first_epoch,
                **more,
            )
        )
    return told


def start(at: float, attempt: int = 1, tasks: Sequence[TaskId] = (W0, W1)) -> list[TimedEvent]:
    """The tasks start, and the cluster is up 3 s later, which the controller learns after 4 s."""
    started = [TimedEvent(at, TaskStarted(task, 7, BEGAN + at), attempt) for task in tasks]
    opened = [TimedEvent(at + 3, TaskListening(task, BEGAN + at + 3 - n), attempt) for n, task in enumerate(tasks)]
    return [to_state(at, "forming", attempt), *started, *opened, to_state(at + 4, "running", attempt)]


def exits(at: float, task: TaskId, code: int = 0, attempt: int = 1, **more: Any) -> TimedEvent:
    return TimedEvent(at, TaskExited(task, TaskExit(code), BEGAN + at, **more), attempt)


def ends(at: float, reference: str, attempt: int = 1, last_progress: float | None = None) -> list[TimedEvent]:
    """The tasks are stopped, which takes 2 s."""
    last = None if last_progress is None else BEGAN + last_progress
    report = AttemptReport(
        attempt=attempt,
        started=BEGAN,
        ended=BEGAN + at + 2,
        last_progress=last,
        tasks=[],
        verdict=Verdict(reference=reference, message="…"),
        processes_left=0,
    )
    return [to_state(at, "stopping", attempt), TimedEvent(at + 2, AttemptEnded(report), attempt)]


def begins_again(at: float, attempt: int = 2) -> list[TimedEvent]:
    """A restart, with its tasks started 1 s later."""
    return [
        to_state(at, "restarting", attempt - 1),
        to_state(at, "connecting", attempt),
        *start(at + 1, attempt),
    ]


def controller(at: float, generation: int) -> TimedEvent:
    return TimedEvent(at, RunStarted("run", "run", "/run", generation), 0)


BEGINS = [controller(0, 0), to_state(0, "connecting"), *start(2)]


KILLED = [exits(30.5, W1, -9), *ends(30.5, "task-killed"), *begins_again(33)]


FAILS = [*BEGINS, *trained(10, 30, resumed=0), *KILLED]
"""21 steps, the first after 10 s, and a failure; the tasks of the restart start after 34 s."""


def done(at: float, attempt: int = 2) -> list[TimedEvent]:
    """All trainers end, and the attempt succeeds."""
    return [exits(at, task, attempt=attempt) for task in (W0, W1)] + ends(at, "succeeded", attempt)


HISTORIES: dict[str, tuple[History, float, dict[str, float]]] = {
    "a run that succeeds": (
        [*BEGINS, *trained(10, 30), *done(31, 1)],
        34,
        {"connecting": 2, "forming": 8, "training": 21, "ending": 3},
    ),
    "a run that has only begun to connect": ([controller(0, 0), to_state(0, "connecting")], 4, {"connecting": 4}),
    "a run that cannot connect": (
        [
            controller(0, 0),
            to_state(0, "connecting"),
            to_state(9, "stopping"),
            TimedEvent(10, Ended("failed", 3, "", "")),
        ],
        10,
        {"connecting": 9, "ending": 1},
    ),
    "a restored optimizer shows where an attempt continues": (
        [*FAILS, *trained(40, 50, attempt=2, resumed=12), *done(50)],
        52,
        # Step 12 was done after 21 s.
        {"connecting": 2, "forming": 8 + 6, "training": 11 + 10, "lost": 9.5, "restarting": 3.5, "ending": 2},
    ),
    "the program's own step numbers show where an attempt continues": (
        [*BEGINS, *trained(10, 30), *KILLED, *trained(40, 50, first=13, attempt=2), *done(50)],
        52,
        {"connecting": 2, "forming": 8 + 6, "training": 11 + 10, "lost": 9.5, "restarting": 3.5, "ending": 2},
    ),
    "the epoch shows where an attempt continues if its steps count from 1": (
        [
            *BEGINS,
            *trained(10, 30, epoch_steps=10),
            *ends(30.5, "task-failed"),
            *begins_again(33),
            *trained(40, 50, attempt=2, epoch_steps=10, first_epoch=2),
            *done(50),
        ],
        52,
        # The second epoch began between the reports after 19 and 20 s.
        {"connecting": 2, "forming": 8 + 6, "training": 9.5 + 10, "lost": 11, "restarting": 3.5, "ending": 2},
    ),
    "steps that start over in each epoch are compared within the epoch": (
        [
            *BEGINS,
            *[steps(10 + n, n % 10, 0, 10, epoch=1 + n // 10, first_epoch=1) for n in range(21)],
            *ends(30, "task-failed"),
            *begins_again(33),
            *[steps(40 + n, 5 + n, 5, 40, 2, epoch=2, first_epoch=2) for n in range(5)],
            *done(44),
        ],
        46,
        # Step 4 of the second epoch was done after 24 s.
        {"connecting": 2, "forming": 8 + 6, "training": 14 + 4, "lost": 6, "restarting": 4, "ending": 2},
    ),
    "an optimizer that was not restored does not mean lost weights": (
        [
            *BEGINS,
            *trained(10, 30, epoch_steps=10, resumed=0),
            *ends(30.5, "task-failed"),
            *begins_again(33),
            *trained(40, 50, attempt=2, epoch_steps=10, first_epoch=3, resumed=0),
            *done(50),
        ],
        52,
        {"connecting": 2, "forming": 8 + 6, "training": 19.5 + 10, "lost": 1, "restarting": 3.5, "ending": 2},
    ),
    "a program that starts from scratch has lost everything": (
        [*FAILS, *trained(40, 50, attempt=2, resumed=0), *done(50)],
        52,
        {"connecting": 2, "forming": 8 + 6, "training": 10, "lost": 20.5, "restarting": 3.5, "ending": 2},
    ),
    "steps that were done after the last report are not lost": (
        [*FAILS, *trained(40, 50, attempt=2, resumed=60), *done(50)],
        52,
        {"connecting": 2, "forming": 8 + 6, "training": 20.5 + 10, "restarting": 3.5, "ending": 2},
    ),
    "an attempt without a step is all forming and loses nothing": (
        [
            *FAILS,
            *ends(44, "task-failed", 2),
            *begins_again(46, 3),
            *trained(50, 60, attempt=3, resumed=12),
            *done(60, 3),
        ],
        62,
        {
            "connecting": 2,
            "forming": 8 + 10 + 3,
            "training": 11 + 10,
            "lost": 9.5,
            "restarting": 3.5 + 3,
            "ending": 2,
        },
    ),
    "a restart from before the checkpoint of an earlier restart loses steps of both attempts": (
        [
            *FAILS,
            *trained(40, 50, attempt=2, resumed=12),
            *ends(50, "task-killed", 2),
            *begins_again(52, 3),
            *trained(60, 70, attempt=3, resumed=5),
            *done(70, 3),
        ],
        72,
        # Step 5 was done after 14 s.
        {
            "connecting": 2,
            "forming": 8 + 6 + 7,
            "training": 4 + 10,
            "lost": 9.5 + 7 + 10,
            "restarting": 3.5 + 3,
            "ending": 2,
        },
    ),
    "a restart from a checkpoint of the last attempt loses only the end of that attempt": (
        [
            *FAILS,
            *trained(40, 50, attempt=2, resumed=12),
            *ends(50, "task-killed", 2),
            *begins_again(52, 3),
            *trained(60, 70, attempt=3, resumed=18),
            *done(70, 3),
        ],
        72,
        # Step 18 is the sixth of the second attempt, done after 45 s.
        {
            "connecting": 2,
            "forming": 8 + 6 + 7,
            "training": 11 + 5 + 10,
            "lost": 9.5 + 5,
            "restarting": 3.5 + 3,
            "ending": 2,
        },
    ),
    "a failure without a restart loses nothing": (
        [*BEGINS, *trained(10, 30), *ends(30.5, "task-killed")],
        36,
        {"connecting": 2, "forming": 8, "training": 20.5, "ending": 5.5},
    ),
    "a restart that is under way": (
        [*BEGINS, *trained(10, 30), *KILLED[:5]],
        33.5,
        {"connecting": 2, "forming": 8, "training": 20.5, "restarting": 3},
    ),
    "training ends with the exception, not with the interpreter": (
        [
            *BEGINS,
            *trained(10, 30),
            exits(31, W0, 1, crash=CrashRecord(BEGAN + 30.5, "UnavailableError", "…")),
            to_state(31, "stopping"),
            exits(32, W1, 1, crash=CrashRecord(BEGAN + 30.25, "ValueError", "…")),
        ],
        33,
        {"connecting": 2, "forming": 8, "training": 20.25, "ending": 2.75},
    ),
    "an exception in another thread does not end training": (
        [*BEGINS, *trained(10, 30), exits(31, W0, 1, crash=CrashRecord(BEGAN + 12, "E", "…", thread="T"))],
        33,
        {"connecting": 2, "forming": 8, "training": 21, "ending": 2},
    ),
    "the time since the last step of a stalled cluster is not training": (
        [*BEGINS, *trained(10, 30), *ends(150, "stalled"), *begins_again(152), *trained(160, 170, 22, 2), *done(170)],
        172,
        {"connecting": 2, "forming": 8 + 7, "training": 20 + 10, "stalled": 120, "restarting": 3, "ending": 2},
    ),
    "without steps, a stall begins at the last output": (
        [*BEGINS, *ends(150, "stalled", last_progress=30)],
        152,
        {"connecting": 2, "forming": 3, "training": 25, "stalled": 120, "ending": 2},
    ),
    "the run waits for a lost node": (
        [
            *BEGINS,
            *trained(10, 30),
            *ends(90, "node-lost"),
            to_state(92, "waiting"),
            *begins_again(122),
            *trained(130, 140, 22, 2),
            *done(140),
        ],
        142,
        {"connecting": 2, "forming": 8 + 7, "training": 20 + 10, "waiting": 60 + 30, "restarting": 3, "ending": 2},
    ),
    "a node that does not come back ends the run": (
        [*BEGINS, *trained(10, 30), *ends(30, "node-lost"), to_state(32, "waiting"), to_state(62, "stopping")],
        63,
        {"connecting": 2, "forming": 8, "training": 20, "restarting": 2, "waiting": 30, "ending": 1},
    ),
    "a program that reports no steps trains while the cluster is up": (
        [*BEGINS, *ends(31, "task-failed"), *begins_again(33), *done(50)],
        52,
        {"connecting": 2, "forming": 3 + 3, "training": 26 + 13, "restarting": 3, "ending": 2},
    ),
    "an attempt without steps is forming if a later attempt reports steps": (
        [*BEGINS, *ends(31, "task-failed"), *begins_again(33), *trained(40, 50, attempt=2), *done(50)],
        52,
        {"connecting": 2, "forming": 29 + 6, "training": 10, "restarting": 3, "ending": 2},
    ),
    "a task that has begun to train but done no step is forming": (
        [*BEGINS, TimedEvent(9, TaskReported(W0, "is training", 0, Progress(0, None, 0, 0.0, 0.0)))],
        12,
        {"connecting": 2, "forming": 10},
    ),
    "time after the end of the program is not training": (
        [*BEGINS, *trained(10, 30), *[exits(31, task) for task in (W0, W1)]],
        90,
        {"connecting": 2, "forming": 8, "training": 21, "ending": 59},
    ),
    "another controller takes over the tasks": (
        [
            *BEGINS,
            *trained(10, 30),
            controller(60, 1),
            to_state(61, "running"),
            *trained(62, 70, first=53),
            *done(70, 1),
        ],
        72,
        {"connecting": 2, "forming": 8, "training": 60, "ending": 2},
    ),
    "another controller restarts the tasks": (
        [*BEGINS, *trained(10, 30), controller(60, 1), *begins_again(64)[1:], *trained(70, 80, 11, 2), *done(80)],
        82,
        {"connecting": 2, "forming": 8 + 5, "training": 9 + 10, "lost": 11, "restarting": 35, "ending": 2},
    ),
    "another controller finds the tasks gone": (
        [
            *BEGINS,
            *trained(10, 30),
            controller(60, 1),
            to_state(61, "running"),
            *ends(62, "node-lost"),
            *begins_again(64),
            *trained(70, 80, 22, 2),
            *done(80),
        ],
        82,
        {"connecting": 2, "forming": 8 + 5, "training": 20 + 10, "restarting": 35, "ending": 2},
    ),
    "an ended run is resumed": (
        [
            *BEGINS,
            *trained(10, 30),
            *ends(30, "interrupted"),
            to_state(33, "interrupted"),
            TimedEvent(33, Ended("interrupted", 130, "interrupted", "…")),
            controller(90, 1),
            *begins_again(94)[1:],
            *trained(100, 110, 22, 2),
            *done(110),
        ],
        112,
        {"connecting": 2, "forming": 8 + 5, "training": 20 + 10, "restarting": 65, "ending": 2},
    ),
}


def count(history: History, decides: Sequence[str] = ("chief", "worker")) -> GoodputCount:
    counted = GoodputCount(BEGAN, decides)
    for each in history:
        counted.note(Record(BEGAN + each.at, each.attempt, each.event))
    return counted


def total(goodput: Goodput) -> float:
    return float(sum(getattr(goodput, kind) for kind in KINDS))


@pytest.mark.parametrize("name", HISTORIES)
def test_goodput_counts_each_second_as_the_right_kind(name: str) -> None:
    history, now, expected = HISTORIES[name]
    goodput = count(history).count(BEGAN + now)
    assert seconds_of(goodput) == expected
    assert sum(expected.values()) == now
    assert goodput.share == pytest.approx(expected.get("training", 0) / now)


def test_goodput_of_a_parameter_server_cluster_counts_only_chief_steps() -> None:
    history = [
        controller(0, 0),
        *start(2, tasks=[W0, CHIEF]),
        *[steps(10 + n, 1 + n, 1, 10, task=CHIEF) for n in range(11)],
        steps(21, 500, 400, 12, task=W0),
        exits(22, W0, 1),
        TimedEvent(23, TaskStarted(W0, 8, BEGAN + 23)),
    ]
    goodput = count(history, ["chief"]).count(BEGAN + 30)
    assert seconds_of(goodput) == {"connecting": 2, "forming": 8, "training": 20}


def test_goodput_ignores_steps_of_auxiliary_tasks() -> None:
    history = [*BEGINS, steps(7, 5, 1, 6, task=TENSORBOARD), *trained(10, 30)]
    assert seconds_of(count(history).count(BEGAN + 30)) == {"connecting": 2, "forming": 8, "training": 20}


def test_goodput_uses_samples_for_progress_missing_from_the_journal() -> None:
    first, *told = trained(10, 30, resumed=0)
    counted = count([*BEGINS, first])
    assert counted.guide == (1, W0)
    for each in told:
        assert isinstance(each.event, TaskReported)
        progress = each.event.progress
        assert progress is not None
        counted.note_sample(W0, ProgressSample(progress.time, progress.step))
        counted.note_sample(W1, ProgressSample(progress.time, 999))
    for each in [*KILLED, *trained(40, 50, attempt=2, resumed=12)]:
        counted.note(Record(BEGAN + each.at, each.attempt, each.event))
    goodput = counted.count(BEGAN + 50)
    assert (goodput.lost_s, goodput.training_s) == pytest.approx((30.5 - 21, 21 - 10 + 10))


# --- any history ---


STATES = st.sampled_from(get_args(StateName))


TASKS = st.sampled_from([W0, W1, TENSORBOARD])


@st.composite
def ended_attempts(draw: st.DrawFn) -> AttemptEnded:
    return AttemptEnded(
        AttemptReport(
            attempt=draw(st.integers(1, 3)),
            started=0.0,
            ended=0.0,
            last_progress=draw(st.none() | MOMENTS.map(lambda at: BEGAN + at)),
            tasks=[],
            verdict=Verdict(reference=draw(st.sampled_from([*IDLE, "task-failed"])), message=""),
            processes_left=0,
        )
    )


EVENTS = st.one_of(
    STATES.map(State),
    STATES.map(State),
    st.builds(TaskReported, TASKS, st.just("is training"), st.just(0.0), progresses()),
    st.builds(TaskReported, TASKS, st.just("is training"), st.just(0.0), progresses()),
    st.builds(TaskStarted, TASKS, st.just(7), st.just(0.0)),
    st.builds(TaskExited, TASKS, st.builds(TaskExit, st.integers(0, 1)), MOMENTS.map(lambda at: BEGAN + at)),
    ended_attempts(),
    st.builds(RunStarted, st.just(""), st.just(""), st.just(""), st.integers(0, 2)),
    st.just(Ended("failed", 1, "", "")),
)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3), EVENTS), max_size=40))
def test_goodput_counts_each_second_once_in_any_history(
    timed: list[tuple[float, int, RunEvent]],
) -> None:
    """No kind is negative, and the lost time never decreases."""
    counted, at = GoodputCount(BEGAN, ("worker",)), 0.0
    before = counted.count(BEGAN)
    for after_s, attempt, event in timed:
        at += after_s
        counted.note(Record(BEGAN + at, attempt, event))
        for now in (at, at + 5):
            goodput = counted.count(BEGAN + now)
            assert total(goodput) == pytest.approx(now, abs=1e-6)
            assert all(getattr(goodput, kind) >= -1e-9 for kind in KINDS)
        after = counted.count(BEGAN + at)
        assert after.lost_s >= before.lost_s - 1e-9
        before = after


# --- the line ---


def test_a_training_line_stays_short_and_loses_little_precision() -> None:
    line = TrainingLine()
    line.go_on_from(TrainingPosition(0, total=0))
    count = 20 * LIMIT
    for step in range(1, count + 1):
        line.add(step / 2, TrainingPosition(step, total=step))
    assert len(line._points) <= LIMIT
    line.end(count / 2)
    assert line.go_on_from(TrainingPosition(0, total=1234)) == pytest.approx((count - 1234) / 2)
    assert line.trained_s == pytest.approx(1234 / 2)


def test_a_late_report_does_not_move_the_training_line_back() -> None:
    line = TrainingLine()
    line.go_on_from(TrainingPosition(0))
    for seconds, step in ((1.0, 10), (2.0, 20), (1.5, 15), (2.0, 20)):
        line.add(seconds, TrainingPosition(step))
    line.end(2.0)
    assert line.go_on_from(TrainingPosition(10)) == 1.0


# --- text ---


def test_the_goodput_message_lists_the_largest_kinds_of_lost_time() -> None:
    spent = dict.fromkeys(KINDS, 0.0)
    short = make_goodput({**spent, "training_s": 41.2, "forming_s": 3.1, "restarting_s": 5.0, "ending_s": 0.3})
    assert render_goodput(short) == "Goodput 83 %: 41.2 s of 49.6 s trained; 5.0 s restarting, 3.1 s forming"
    long = make_goodput({**spent, "training_s": 7200.0, "waiting_s": 800.0})
    assert render_goodput(long) == "Goodput 90 %: 2 h of 2 h 13 min trained; 13 min 20 s waiting"
    assert render_goodput(make_goodput(spent)) == "Goodput 0 %: 0.0 s of 0.0 s trained"
