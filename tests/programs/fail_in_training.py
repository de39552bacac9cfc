"""A worker of a real cluster, which trains until TASK fails in the way HOW: TASK HOW [STEPS]."""

import ctypes
import os
import signal
import sys
import threading
import time

culprit, how = sys.argv[1:3]
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 1_000_000
me = os.environ["DISTLAUNCH_TASK"] == culprit


def load_batch(number: int) -> None:
    raise KeyError(f"bad sample {number}")


if me and how == "raise-early":
    load_batch(0)

import numpy as np  # noqa: E402 - a failure before the import is one of the ways
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def read(number: int) -> object:
    if me and how == "raise-in-map" and number == 20:
        load_batch(number)
    return np.float32(1.0)


data = tf.data.Dataset.range(steps).map(lambda n: tf.ensure_shape(tf.numpy_function(read, [n], tf.float32), []))
step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))


def fail() -> None:
    if how in ("kill", "stop", "term"):
        os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))
    elif how == "raise":
        load_batch(20)
    elif how == "exit-0":
        sys.exit(0)
    elif how == "exit-text":
        sys.exit("the data ran out")
    elif how == "os-exit":
        os._exit(5)
    elif how == "sleep":
        time.sleep(600)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "raise-in-thread":
        thread = threading.Thread(target=load_batch, args=(20,), name="loader")
        thread.start()
        thread.join()
        sys.exit(1)
    elif how == "out-of-memory":
        held = []
        while True:
            held.append(bytearray(1 << 24))


for number, _ in enumerate(data):
    step()
    if me and number == 20:
        print("about to fail", flush=True)
        fail()
    time.sleep(0.002)
print("done", flush=True)
