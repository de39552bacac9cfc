"""Measures how long a process of JAX waits for its devices, and with them for the other processes.

Whatever the devices compute in a step is one program, with the exchange between processes in it. So the time that is
left, the process's own, is that of its Python code, callbacks and input. A process whose device is slower than those of
the others cannot be told from one that waits: both take equally long for a step.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import

ARRAY = "jax._src.array"
TRAINER = "keras.src.backend.jax.trainer"
"""The module of the trainer of Keras on JAX."""
CALLBACKS = "keras.src.callbacks.callback_list"


class Stopwatch:
    """Adds up the time that the main thread spends in some functions."""

    def __init__(self) -> None:
        self.runs = False
        """Whether one of the functions was ever called."""
        self._seconds = 0.0
        self._began: Optional[float] = None

    def seconds(self) -> float:
        began = self._began
        return self._seconds + (time.monotonic() - began if began is not None else 0.0)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls count; calls within a call count once."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._began is not None or threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self.runs, self._began = True, time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds, self._began = self.seconds(), None

        return call


class JaxClock:
    """Measures this process's waits, starting when JAX and Keras are imported."""

    def __init__(self) -> None:
        self._devices, self._input = Stopwatch(), Stopwatch()
        self._next = self._input.timed(next)
        after_import(ARRAY, self._watch_reads)
        after_import(TRAINER, self._watch_steps)
        after_import(CALLBACKS, self._watch_logs)

    def waited_s(self) -> Optional[float]:
        """The seconds of waiting for the devices so far; None if no step has been seen."""
        return self._devices.seconds() if self._devices.runs else None

    def read_s(self) -> Optional[float]:
        """The seconds of waiting for input so far; None if it is not known."""
        return self._input.seconds() if self._input.runs else None

    def _watch_reads(self, module: ModuleType) -> None:
        array: Any = getattr(module, "ArrayImpl", None)
        value = getattr(array, "_value", None)
        if isinstance(value, property) and value.fget is not None:
            array._value = property(self._devices.timed(value.fget))

    def _watch_steps(self, module: ModuleType) -> None:
        trainer: Any = getattr(module, "JAXTrainer", None)
        make = getattr(trainer, "_make_function", None)
        if make is None:
            return

        @functools.wraps(make)
        def make_measured(self_: Any, step_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = make(self_, self._devices.timed(step_function), *args, **kwargs)
            return lambda state, iterator: run(state, map(self._next, itertools.repeat(iterator)))

        trainer._make_function = make_measured

    def _watch_logs(self, module: ModuleType) -> None:
        """Waits for the logs of a step, which Keras reads at once to give them to the callbacks."""
        callbacks: Any = getattr(module, "CallbackList", None)
        end = getattr(callbacks, "_on_train_batch_end", None)
        if end is None:
            return

        @functools.wraps(end)
        def end_measured(self_: Any, batch: Any, logs: Any = None) -> None:
            if "jax" in sys.modules:
                self._devices.timed(sys.modules["jax"].block_until_ready)(logs)
            end(self_, batch, logs)

        callbacks._on_train_batch_end = end_measured
