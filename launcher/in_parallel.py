"""Parallel map over nodes, on as many threads as the system allows; if it allows none, on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_parallel(function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> list[_Result]:
    """Returns the results in the order of the items; raises the error of the first failed item once all are done."""
    todo = list(enumerate(items))
    count = len(todo)
    results: dict[int, _Result] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                number, item = todo.pop(0)  # atomic: two threads never get the same item
            except IndexError:
                return
            try:
                results[number] = function(item)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                errors[number] = error

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, count) - 1)]
    started = []
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:  # no more threads are allowed; the existing threads do all the work
            break
        started.append(helper)
    work()
    for helper in started:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(count)]
