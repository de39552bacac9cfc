"""Real time: a wait returns as soon as an item arrives, and repeated calls can be cancelled."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from launcher.clock import SystemTiming
from tests.harness.polling import eventually


def test_a_wait_returns_an_item_that_arrives_before_the_timeout() -> None:
    arrivals: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Timer(0.05, arrivals.put, ["news"]).start()
    assert SystemTiming().wait(arrivals, 60.0) == "news"


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.05])
def test_a_wait_without_an_item_ends_at_its_timeout(timeout_s: float) -> None:
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        SystemTiming().wait(queue.SimpleQueue[str](), timeout_s)
    assert time.monotonic() - began >= timeout_s


def test_a_repeated_call_stops_once_it_returns_true() -> None:
    answers = iter([False, False, True])
    calls: list[bool] = []
    before = {*threading.enumerate()}

    def call() -> bool:
        calls.append(next(answers))
        return calls[-1]

    SystemTiming().repeat(call, 0.01)

    def over() -> None:
        assert calls == [False, False, True]
        assert {*threading.enumerate()} <= before

    eventually(over)


def test_slow_work_is_waited_for_until_a_check_fails() -> None:
    is_done, checks = threading.Event(), iter([None, None])

    def check() -> None:
        if next(checks, InterruptedError) is not None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        SystemTiming().run_checked(is_done.wait, check)
    is_done.set()
    assert SystemTiming().run_checked(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        SystemTiming().run_checked(lambda: 1 / 0, lambda: None)


def test_a_repeated_call_can_be_cancelled_before_the_first_call() -> None:
    never = threading.Event()
    before = {*threading.enumerate()}
    SystemTiming().repeat(never.is_set, 0.0, first_s=60.0)()

    def over() -> None:
        assert {*threading.enumerate()} <= before

    eventually(over)  # long before the first call
