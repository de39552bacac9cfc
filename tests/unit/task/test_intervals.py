"""The 99th percentile of the time between batches, from how many were done in each half second."""

from __future__ import annotations

import pytest

from worker_entry.task.intervals import Intervals


def test_nothing_is_known_before_the_first_interval() -> None:
    intervals = Intervals()
    assert intervals.p99_s is None
    intervals.note(0, 0.5)
    assert intervals.p99_s is None


@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.4, 3.0])
def test_the_percentile_of_even_steps_is_the_time_of_a_step(step_s: float) -> None:
    intervals = Intervals()
    for _ in range(200):
        batches = max(round(0.5 / step_s), 1)
        intervals.note(batches, batches * step_s)
    assert intervals.p99_s == pytest.approx(step_s, rel=0.15)


@pytest.mark.parametrize(("every", "is_usual"), [(50, True), (500, False)])
def test_a_long_step_counts_if_it_is_at_least_one_of_a_hundred(every: int, is_usual: bool) -> None:
    """30 times as long as the others, or a callback at the end of each epoch."""
    intervals = Intervals()
    for number in range(0, 5000, 5):
        intervals.note(5, 0.5)
        if number % every == 0:
            intervals.note(5, 3.4)  # four steps of 0.1 s, and one of 3 s
    assert intervals.p99_s == pytest.approx(3.0 if is_usual else 0.1, rel=0.15)


def test_few_long_steps_count_as_usual() -> None:
    intervals = Intervals()
    for seconds in (0.1, 4.0, 0.1):
        intervals.note(1, seconds)
    assert intervals.p99_s == pytest.approx(4.0, rel=0.15)


def test_steps_that_take_no_time_are_counted() -> None:
    intervals = Intervals()
    intervals.note(100, 0.0)
    assert intervals.p99_s is not None
    assert intervals.p99_s < 1e-5
