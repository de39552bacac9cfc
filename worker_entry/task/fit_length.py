"""Determines how long a `model.fit` will be, and from which step it resumes, from Keras's list of callbacks."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Optional

from worker_entry.task.meter import Meter

READ_LIMIT_S = 0.2
"""How long reading the optimizer's count may block the program: a device or a parameter server may not answer."""


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
