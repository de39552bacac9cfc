"""Measures how long this process waits for its input: the time in `next(iterator)`.

The iterators of tf.distribute and of `fit` call those of tf.data, so only tf.data's iterators are timed: in Python and,
if the step takes its batch itself, inside a graph. If a step runs during a request for the next batch, the request
still counts as waiting.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import
from worker_entry.hooks.op_timer import CONTEXT, OpTimer, is_deterministic

ITERATORS = "tensorflow.python.data.ops.iterator_ops"
REQUESTS = ("__next__", "get_next", "get_next_as_optional")
LAST = "_distlaunch_last_request"
"""The attribute of a graph that holds the end of its last request."""


class InputClock:
    """Measures this process's requests for input, starting when TensorFlow is imported."""

    def __init__(self) -> None:
        self._timer = OpTimer()
        self._waiting = False
        """Whether the main thread is in a request now: tf.data may run a Python function there that makes another."""
        after_import(ITERATORS, self._watch)

    def waited_s(self) -> Optional[float]:
        """The seconds that the program has waited so far; None if unknown."""
        try:
            return self._timer.seconds() if self._timer.used and not is_deterministic() else None
        except Exception:  # noqa: BLE001 - for example, while a graph is built
            return None

    def _watch(self, module: ModuleType) -> None:
        iterator = getattr(module, "OwnedIterator", None)
        requests = {name: getattr(iterator, name, None) for name in REQUESTS}
        if all(map(_is_plain, requests.values())):
            for name, request in requests.items():
                setattr(iterator, name, self._timed(request))

    def _timed(self, request: Any) -> Callable[[Any], Any]:
        @functools.wraps(request)
        def call(self_: Any) -> Any:
            if sys.modules[CONTEXT].executing_eagerly():
                # Another thread may prepare input or train; which of the two is unknown.
                if self._waiting or threading.get_ident() != threading.main_thread().ident:
                    return request(self_)
                self._waiting = True
                try:
                    return self._timer.time_call(lambda: request(self_))
                finally:
                    self._waiting = False
            return self._add(lambda: request(self_))

        return call

    def _add(self, request: Callable[[], Any]) -> Any:
        """Adds a request to the graph that is being built."""
        tf = sys.modules["tensorflow"]
        graph = tf.compat.v1.get_default_graph()
        # A request must begin after the previous one has ended, even if both could run at once.
        began = self._timer.begin(getattr(graph, LAST, []))
        if began is None:
            return request()
        with tf.control_dependencies([began]):
            batch = request()
        ended = self._timer.end(began, batch)
        setattr(graph, LAST, [ended] if ended is not None else [])
        return batch


def _is_plain(request: Any) -> bool:
    """Whether the method takes no argument except `self`."""
    code = getattr(request, "__code__", None)
    return code is not None and code.co_argcount == 1 and not code.co_kwonlyargcount
