"""The demo with a pause before each step, so that it lasts as long as a test needs without loading the machine."""

import runpy
import time
from typing import Any

import keras
import tensorflow as tf

PAUSE_S = 0.03


class Pause(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(PAUSE_S)


def fit(model: Any, *arguments: Any, callbacks: Any = (), **options: Any) -> Any:
    return whole_fit(model, *arguments, callbacks=[*callbacks, Pause()], **options)


def schedule(coordinator: Any, *arguments: Any, **options: Any) -> Any:
    time.sleep(PAUSE_S)
    return whole_schedule(coordinator, *arguments, **options)


coordinators = tf.distribute.coordinator.ClusterCoordinator
whole_fit, keras.Model.fit = keras.Model.fit, fit
whole_schedule, coordinators.schedule = coordinators.schedule, schedule
runpy.run_module("worker_entry.demo.train", run_name="__main__", alter_sys=True)
