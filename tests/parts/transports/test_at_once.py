"""Parallel work for many nodes: every item is done, and results keep their order, despite failures and few threads."""

from __future__ import annotations

import threading

import pytest

from launcher.transports.in_parallel import map_parallel


def test_results_are_in_the_order_of_the_items() -> None:
    assert map_parallel(lambda number: number * 2, range(100), 8) == [number * 2 for number in range(100)]
    assert map_parallel(str, [], 8) == []


def test_as_many_items_are_done_at_once_as_requested() -> None:
    reattach_folder = threading.Barrier(4)
    map_parallel(lambda _: reattach_folder.wait(10), range(8), 4)


def test_all_are_done_though_some_fail_and_the_first_failure_is_raised() -> None:
    done = []

    def work(number: int) -> None:
        done.append(number)
        if number in (3, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="3"):
        map_parallel(work, range(8), 3)
    assert sorted(done) == [*range(8)]


def test_without_new_threads_the_calling_thread_does_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_parallel(lambda _: threading.current_thread(), range(3), 8) == [threading.main_thread()] * 3
