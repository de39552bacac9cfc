"""A worker that keeps the others waiting is reported with a reason; one slow second is not enough."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.events import TaskReported
from launcher.gang.watch.stragglers import (
    ENOUGH,
    REPEAT_S,
    WINDOW_S,
    WINDOWS,
    News,
    Pace,
    Standing,
    StragglerWatch,
    find_reason,
    medians_of_others,
)
from launcher.report.run_events import Straggler, parse_record, render_record
from launcher.report.samples import TaskUse
from launcher.tasks import TaskId
from tests.harness.builders.gang import W0, W1, W2
from tests.harness.builders.stragglers import ENOUGH_S
from worker_entry.protocol.values import Progress

COLLECTIVE_S = 0.02
"""Seconds of a step in which the slowest task waits."""
OwnTimes = Mapping[TaskId, Sequence[float]]
"""Each task's own time of a step, second by second."""


def follow(
    times: OwnTimes,
    watch: StragglerWatch,
    began: float = 1000.0,
    uses: Mapping[TaskId, TaskUse] | None = None,
    data_s: Mapping[TaskId, float] | None = None,
) -> list[News]:
    """The watch's news while all tasks measure once a second, and report each measurement twice."""
    news: list[News] = []
    for second, own in enumerate(zip(*times.values(), strict=True)):
        step_s = max(own) + COLLECTIVE_S
        for place, (task, own_s) in enumerate(zip(times, own, strict=True)):
            progress = Progress(
                second,
                1,
                second,
                began,
                began + second,
                step_s=step_s + 1e-9 * second,  # two measurements are never equal
                own_s=own_s,
                data_s=(data_s or {}).get(task),
            )
            event = TaskReported(task, "is training", began, progress)
            for _ in range(2):
                news += watch.note(event, began + second + place / 10, lambda: uses or {})
    return news


def steady(**own: float) -> OwnTimes:
    """Tasks `w0`, `w1`, … that always take the same time, for long enough."""
    return {TaskId("worker", int(name[1:])): [seconds] * ENOUGH_S for name, seconds in own.items()}


class TestDetection:
    def test_a_straggler_is_compared_with_the_median_of_the_other_tasks(self) -> None:
        watch = StragglerWatch()
        [news] = follow(steady(w0=0.1, w1=0.15), watch)
        assert news.message == (
            "worker:1 takes 1.5 × the median step: 150 ms of its own, the others 100 ms, and then they wait for it; "
            "reason: own computation"
        )
        assert (news.task, round(news.score, 3), news.reason) == (W1, 0.667, "own computation")
        scores = {task: round(standing.score, 2) for task, standing in watch.standings.items()}
        assert scores == {W0: 1.5, W1: 0.67}
        assert {task: standing.slow for task, standing in watch.standings.items()} == {W0: "", W1: "own computation"}

    @pytest.mark.parametrize(
        "own",
        [
            {"w2": 0.3},  # no other task to compare it with
            {"w0": 0.2, "w1": 0.2, "w2": 0.26},  # a score of 0.77
            {"w0": 0.001, "w1": 0.001, "w2": 0.003},  # insignificant for a step that waits 20 ms
            {"w0": 0.0, "w1": 0.1},  # nothing was measured of the other task
            {"w0": 0.0, "w1": 0.0},
        ],
    )
    def test_a_task_without_a_significant_delay_is_no_straggler(self, own: dict[str, float]) -> None:
        assert follow(steady(**own), StragglerWatch()) == []

    def test_every_slow_task_is_reported_as_a_straggler(self) -> None:
        news = follow(steady(w0=0.1, w1=0.3, w2=0.1, w3=0.3, w4=0.1), StragglerWatch())
        assert {each.task for each in news} == {W1, TaskId("worker", 3)}

    def test_a_straggler_is_reported_after_several_windows_and_not_again_soon(self) -> None:
        watch = StragglerWatch()
        slow, fast = {W0: [0.1] * ENOUGH_S, W1: [0.3] * ENOUGH_S}, {W0: [0.1] * ENOUGH_S, W1: [0.1] * ENOUGH_S}
        few = round(WINDOW_S * (WINDOWS - 1))
        assert follow({task: times[:few] for task, times in slow.items()}, watch, 0.0) == []
        [named] = follow(slow, watch, 100.0)
        assert named.reason == "own computation"
        assert follow(slow, watch, 200.0) == []
        [recovered] = follow(fast, watch, 300.0)
        assert (recovered.message, recovered.reason) == ("worker:1 is as fast as the others again", "")
        assert watch.standings[W1].slow == ""
        assert follow(slow, watch, 400.0) == []
        assert watch.standings[W1].slow == "own computation"
        assert follow(fast, watch, 500.0) == []  # no news: its second slowness was not reported
        assert len(follow(slow, watch, 100.0 + REPEAT_S + ENOUGH_S)) == 1

    def test_a_straggler_window_waits_for_measurements_of_every_task(self) -> None:
        """Steps may take longer than a window."""
        watch = StragglerWatch()
        news: list[News] = []
        for number in range(ENOUGH * WINDOWS):
            assert news == []
            for task, own_s in ((W0, 5.0), (W1, 15.0)):
                progress = Progress(number, 1, number, 0.0, 20.0 * number, step_s=20.0, own_s=own_s + number * 1e-6)
                news += watch.note(TaskReported(task, "is training", 0.0, progress), 20.0 * number + 1, dict)
        assert [each.task for each in news] == [W1]

    def test_tasks_that_report_no_step_time_of_their_own_are_not_compared(self) -> None:
        watch = StragglerWatch()
        for progress in (None, Progress(1, 1, 1, 0.0, 1.0), Progress(1, 1, 1, 0.0, 1.0, step_s=0.1)):
            assert watch.note(TaskReported(W0, "is training", 0.0, progress), 100.0, dict) == ()
        assert watch.standings == {}

    @given(st.dictionaries(st.integers(0, 20), st.floats(0, 10), min_size=2))
    def test_medians_of_others_equal_the_statistical_medians(self, values: dict[int, float]) -> None:
        own = {TaskId("worker", number): value for number, value in values.items()}
        expected = {
            task: pytest.approx(statistics.median(value for other, value in own.items() if other != task))
            for task in own
        }
        assert medians_of_others(own) == expected


JITTER = st.floats(0.95, 1.05)


@st.composite
def noisy_times(draw: st.DrawFn) -> OwnTimes:
    """Two to four equal tasks on loaded cores: each has bursts of some seconds, and its usual pace between them."""
    times = {}
    for number in range(draw(st.integers(2, 4))):
        seconds: list[float] = []
        while len(seconds) < 60:
            seconds += [0.1] * draw(st.integers(6, 20))
            seconds += [draw(st.floats(0.1, 0.5))] * draw(st.integers(1, 8))
        times[TaskId("worker", number)] = [own_s * draw(JITTER) for own_s in seconds[:60]]
    return times


class TestNoise:
    @given(noisy_times())
    def test_short_bursts_of_load_make_no_task_a_straggler(self, times: OwnTimes) -> None:
        assert follow(times, StragglerWatch()) == []

    @given(
        st.lists(st.lists(JITTER, min_size=ENOUGH_S, max_size=ENOUGH_S), min_size=2, max_size=5),
        st.floats(1.6, 10.0),
        st.data(),
    )
    def test_a_slow_task_is_reported_as_a_straggler_despite_noise(
        self, noise: list[list[float]], factor: float, data: st.DataObject
    ) -> None:
        slow = data.draw(st.integers(0, len(noise) - 1))
        times = {
            TaskId("worker", number): [0.1 * each * (factor if number == slow else 1.0) for each in jitter]
            for number, jitter in enumerate(noise)
        }
        assert [news.task for news in follow(times, StragglerWatch())] == [TaskId("worker", slow)]


USUAL = Pace(step_s=0.2, own_s=0.05, data_s=0.01, cpu=0.5, starved=0.05, memory=1000.0, swapped=0.0)
MEASURED = st.floats(0, 1e3)
KNOWN = st.none() | MEASURED
PACES = st.builds(
    Pace, step_s=MEASURED, own_s=MEASURED, data_s=KNOWN, cpu=KNOWN, starved=KNOWN, memory=KNOWN, swapped=KNOWN
)


class TestReason:
    @pytest.mark.parametrize(
        ("slow", "usual", "reason"),
        [
            (
                Pace(step_s=0.2, own_s=0.15, data_s=0.11, cpu=0.5, starved=0.05),
                USUAL,
                "input pipeline (it waits 110 ms for its input, the others 10 ms)",
            ),
            (
                Pace(step_s=0.2, own_s=0.15, data_s=0.11),
                Pace(step_s=0.2, own_s=0.05),
                "input pipeline (it waits 110 ms for its input)",
            ),
            (Pace(step_s=0.2, own_s=0.15, data_s=0.05, cpu=0.8, starved=0.05), USUAL, "own computation"),
            (Pace(step_s=0.2, own_s=0.15), Pace(step_s=0.2, own_s=0.05), "own computation"),
            (
                # half a core for as much work
                Pace(step_s=0.2, own_s=0.15, data_s=0.02, cpu=0.5, starved=1.0),
                USUAL,
                "CPU starved (it uses 0.5 cores, and 1 threads wait for one)",
            ),
            (
                # a quota is used up: the input comes late, too
                Pace(step_s=0.2, own_s=0.15, data_s=0.11, cpu=0.3, starved=2.6),
                USUAL,
                "CPU starved (it uses 0.3 cores, and 2.6 threads wait for one)",
            ),
            (
                # it works twice as much on a machine where all wait for cores: more threads wait, but none for longer
                Pace(step_s=0.2, own_s=0.15, data_s=0.01, cpu=1.5, starved=1.5),
                Pace(step_s=0.2, own_s=0.05, data_s=0.01, cpu=0.5, starved=0.5),
                "own computation",
            ),
            (
                # it sleeps: its little computation waits only briefly
                Pace(step_s=0.2, own_s=0.15, data_s=0.0, cpu=0.01, starved=0.02),
                USUAL,
                "own computation",
            ),
            (
                Pace(step_s=0.2, own_s=0.15, data_s=0.02, cpu=0.1, starved=0.01, memory=600.0, swapped=400.0),
                USUAL,
                "swapping (40% of its memory is in swap)",
            ),
            (
                Pace(step_s=0.2, own_s=0.15, data_s=0.02, cpu=0.1, starved=0.01, memory=600.0, swapped=400.0),
                Pace(step_s=0.2, own_s=0.05, memory=600.0, swapped=390.0),  # like the others
                "own computation",
            ),
        ],
    )
    def test_the_straggler_reason_explains_most_of_the_additional_time(
        self, slow: Pace, usual: Pace, reason: str
    ) -> None:
        assert str(find_reason(slow, usual)) == reason

    @given(PACES, PACES)
    def test_every_straggler_has_a_reason_for_any_measurements(self, slow: Pace, usual: Pace) -> None:
        assert find_reason(slow, usual).what in {"input pipeline", "CPU starved", "swapping", "own computation"}

    def test_the_straggler_reason_uses_reported_input_time_and_cpu_use(self) -> None:
        times = steady(w0=0.1, w1=0.3, w2=0.1)
        [by_input] = follow(times, StragglerWatch(), data_s={W0: 0.01, W1: 0.2, W2: 0.01})
        assert by_input.reason == "input pipeline"
        waits = {W0: 0.1, W1: 2.0, W2: 0.1}
        uses = {task: TaskUse(0.0, 0.5, starved, 0, 0, 0, 0.0, 0.0) for task, starved in waits.items()}
        watch = StragglerWatch()
        [by_cpu] = follow(times, watch, uses=uses)
        assert by_cpu.message.endswith("; reason: CPU starved (it uses 0.5 cores, and 2 threads wait for one)")
        assert watch.standings[W1] == Standing(by_cpu.score, "CPU starved")


def test_a_straggler_record_of_an_earlier_version_is_read() -> None:
    line = b'{"time":1.0,"attempt":1,"event":"straggler","task":"worker:1","message":"worker:1 takes 2 \xc3\x97"}\n'
    record = parse_record(line)
    assert record is not None
    assert record.event == Straggler(W1, "worker:1 takes 2 ×")
    assert parse_record(render_record(record)) == record
