"""Counts the steps of `model.fit`, by patching the list of callbacks that Keras calls."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import
from worker_entry.hooks.remote_values import result_of
from worker_entry.task.meter import Meter

CALLBACK_LISTS = ("keras.src.callbacks.callback_list", "tf_keras.src.callbacks")
READ_LIMIT_S = 0.2
"""How long reading the optimizer's count may block the program: a device or a parameter server may not answer."""


def install(
    meter: Meter, begin_keras: Callable[[], None] = lambda: None, begin_tf_keras: Callable[[], None] = lambda: None
) -> None:
    """Patches Keras when it is imported, or now if it is already imported; ignores an unknown implementation.

    Args:
        meter: counts the steps.
        begin_keras: called when a program begins to train with Keras 3.
        begin_tf_keras: called when it begins to train with tf_keras.
    """
    keras, tf_keras = CALLBACK_LISTS
    after_import(keras, lambda module: _watch(module, meter, begin_keras))
    after_import(tf_keras, lambda module: _watch(module, meter, begin_tf_keras))


def _watch(module: ModuleType, meter: Meter, begin: Callable[[], None]) -> None:
    callbacks = getattr(module, "CallbackList", None)
    last = [-1]
    later = [0]
    under_way = [0]  # calls of callbacks: what one of them trains or evaluates is nested in that call
    length = FitLength(meter)

    def begin_train(callback_list: Any, logs: Any = None) -> None:
        begin()
        meter.resume(read_iterations(callback_list))
        length.begin_train()
        meter.begin()
        later[0] = count_later_steps(module.__name__, callback_list)

    def begin_epoch(callback_list: Any, epoch: Any, logs: Any = None) -> None:
        last[0] = -1
        meter.begin_epoch(int(epoch) + 1)
        length.begin_epoch(callback_list, int(epoch))

    def end_step(callback_list: Any, batch: Any, logs: Any = None) -> None:
        number = int(batch)
        if later[0]:
            number = min(number + later[0], int(callback_list.params.get("steps") or sys.maxsize) - 1)
        done = max(number - last[0], 1)  # several steps with steps_per_execution
        last[0] = number
        result = result_of(logs)
        if result is None:
            meter.count_step(meter.step + done, logs)
        else:  # under ParameterServerStrategy, the step is only scheduled
            meter.schedule(done, result)

    def end_batch(_: Any, batch: Any, logs: Any = None) -> None:
        result = result_of(logs)
        if result is None:
            meter.count_batch()
        else:
            meter.schedule(0, result)

    def end_epoch(_: Any, epoch: Any, logs: Any = None) -> None:
        meter.end_epoch(logs)
        length.end_epoch()

    def end_train(_: Any, logs: Any = None) -> None:
        meter.end()

    def ignore(*_: Any, **__: Any) -> None:
        pass

    # The functions to call after each callback: in this `fit`, and in a nested one, whose batches show progress.
    after: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
        "on_train_begin": (begin_train, ignore),
        "on_epoch_begin": (begin_epoch, ignore),
        "on_train_batch_end": (end_step, end_batch),
        "on_test_batch_end": (end_batch, end_batch),
        "on_predict_batch_end": (end_batch, end_batch),
        "on_epoch_end": (end_epoch, ignore),
        "on_train_end": (end_train, ignore),
        **dict.fromkeys(("on_train_batch_begin", "on_test_begin", "on_test_end"), (ignore, ignore)),
        **dict.fromkeys(("on_predict_begin", "on_predict_end"), (ignore, ignore)),
    }
    if callbacks is not None and all(callable(getattr(callbacks, name, None)) for name in after):
        for name, (then, nested) in after.items():
            setattr(callbacks, name, _followed(getattr(callbacks, name), then, nested, under_way))


def _followed(
    original: Callable[..., Any], then: Callable[..., None], nested: Callable[..., None], under_way: list[int]
) -> Callable[..., Any]:
    # Called afterwards, so that a step counts as done only when the program's own callbacks have saved it.
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        under_way[0] += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            under_way[0] -= 1
        with contextlib.suppress(Exception):  # a failure to count must not fail the training
            (nested if under_way[0] else then)(self, *args, **kwargs)
        return result

    return call


class FitLength:
    """Tracks the step and the epoch at which a `fit` will end, in the meter's count.

    Keras may not know the number of steps per epoch until the first epoch is over.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._steps: Optional[int] = None
        self._began = 0

    def begin_train(self) -> None:
        self._steps = None

    def begin_epoch(self, callback_list: Any, epoch: int) -> None:
        """Notes that an epoch begins; `epoch` counts from 0."""
        self._began = self._meter.step
        epochs = int(callback_list.params["epochs"])
        steps = callback_list.params.get("steps") or self._steps
        self._meter.expect(self._began + max(epochs - epoch, 0) * int(steps) if steps else None, epochs)

    def end_epoch(self) -> None:
        self._steps = self._meter.step - self._began


def count_later_steps(name: str, callback_list: Any) -> int:
    """The number of steps of an execution after the one by which Keras numbers it.

    That is the last step; before Keras 3.11, it is the first.

    Args:
        name: the name of Keras's module.
        callback_list: its list of callbacks.
    """
    version = str(getattr(sys.modules.get("keras.src.version"), "__version__", ""))
    if not name.startswith("keras.") or [*map(int, re.findall(r"\d+", version)[:2])] >= [3, 11]:
        return 0
    model = getattr(callback_list, "_model", None) or callback_list.model
    return int(getattr(model, "steps_per_execution", 1)) - 1


def read_iterations(callback_list: Any) -> Optional[int]:
    """The number of steps done by the model's optimizer; None without an optimizer or if reading takes too long."""
    found: list[int] = []

    def read() -> None:
        with contextlib.suppress(BaseException):  # the program's objects may raise anything
            # Reading `model` makes Keras 3 copy the state of JAX to the model; reading `_model` does not.
            model = getattr(callback_list, "_model", None) or callback_list.model
            optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
            # With gradient accumulation, `iterations` counts updates, and the variable behind it counts steps.
            found.append(int(optimizer._iterations.numpy()))

    thread = threading.Thread(target=read, name="distlaunch iterations", daemon=True)
    thread.start()
    thread.join(READ_LIMIT_S)
    return found[0] if found else None
