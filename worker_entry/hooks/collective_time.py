"""Measures how long this worker waits for the others, which the duration of a step does not show.

In synchronous training all workers take the same time for a step, because each worker waits in its collectives for the
slowest one. So two more operations measure the time of each collective; the rest of a step is the worker's own time.

On a GPU, a collective is queued long before its input is ready, so its time means nothing and is not measured. Nor is
it measured in a program that asks for deterministic operations, where TensorFlow refuses a clock.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import
from worker_entry.hooks.op_timer import OpTimer, is_deterministic

UTILS = "tensorflow.python.distribute.cross_device_utils"


class CollectiveClock:
    """Measures this process's collectives, starting when TensorFlow is imported."""

    def __init__(self) -> None:
        self._timers: list[OpTimer] = []
        after_import(UTILS, self._watch)

    def waited_s(self) -> Optional[float]:
        """The seconds that the longest-waiting replica has waited so far; None if unknown."""
        try:
            if is_deterministic():
                return None
            return max((timer.seconds() for timer in self._timers), default=None)
        except Exception:  # noqa: BLE001 - for example, while a graph is built
            return None

    def _watch(self, module: ModuleType) -> None:
        launcher = getattr(module, "CollectiveReplicaLauncher", None)
        if launcher is None or "input_tensor" not in inspect.signature(launcher.all_reduce).parameters:
            return
        initialize, reduce = launcher.__init__, launcher.all_reduce
        timers: weakref.WeakKeyDictionary[Any, OpTimer] = weakref.WeakKeyDictionary()

        @functools.wraps(initialize)
        def initialize_and_measure(self_: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self_, *args, **kwargs)
            if "GPU" not in str(getattr(self_, "_device", "GPU")).upper():
                timers[self_] = OpTimer()
                self._timers.append(timers[self_])

        @functools.wraps(reduce)
        def all_reduce(self_: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            timer = timers.get(self_) if not is_deterministic() else None
            if timer is not None and sys.modules["tensorflow"].executing_eagerly():
                return timer.time_call(lambda: reduce(self_, input_tensor, *args, **kwargs))
            began = timer.begin([input_tensor]) if timer is not None else None
            reduced = reduce(self_, input_tensor, *args, **kwargs)
            if timer is not None and began is not None:
                timer.end(began, reduced)
            return reduced

        launcher.__init__ = initialize_and_measure
        launcher.all_reduce = all_reduce
