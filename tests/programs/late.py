"""TASK does another all-reduce after its program has ended, when the leader is gone: TASK."""

import atexit
import os
import sys
import time

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))


def ask() -> None:
    time.sleep(2)
    try:
        step()
    except tf.errors.UnavailableError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)


for _ in range(20):
    step()
if os.environ["DISTLAUNCH_TASK"] == sys.argv[1]:
    atexit.register(ask)
