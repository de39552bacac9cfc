"""The same for many nodes at once, by as many threads as this system allows, and by this one alone if it must be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_parallel(function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> list[_Result]:
    """The results in the order of the items; raises what the first of them raised, once all are done."""
    todo = list(enumerate(items))
    count = len(todo)
    results: dict[int, _Result] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                number, item = todo.pop(0)  # one operation, of which two threads never get the same
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
        except RuntimeError:  # no more threads are allowed; those there are do all of it
            break
        started.append(helper)
    work()
    for helper in started:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(count)]
