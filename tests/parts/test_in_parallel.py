"""Parallel work for many nodes: every item is done, and results keep their order, despite failures and few threads."""

from __future__ import annotations

import threading

import pytest

from launcher.in_parallel import map_parallel


def test_map_parallel_returns_results_in_the_order_of_the_items() -> None:
    assert map_parallel(lambda number: number * 2, range(100), 8) == [number * 2 for number in range(100)]
    assert map_parallel(str, [], 8) == []


def test_map_parallel_processes_as_many_items_concurrently_as_requested() -> None:
    reattach_folder = threading.Barrier(4)
    map_parallel(lambda _: reattach_folder.wait(10), range(8), 4)


def test_map_parallel_processes_all_items_and_raises_the_first_failure() -> None:
    done = []

    def work(number: int) -> None:
        done.append(number)
        if number in (3, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="3"):
        map_parallel(work, range(8), 3)
    assert sorted(done) == [*range(8)]


def test_map_parallel_uses_the_calling_thread_if_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_parallel(lambda _: threading.current_thread(), range(3), 8) == [threading.main_thread()] * 3
