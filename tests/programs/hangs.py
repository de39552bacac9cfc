"""A custom loop in which worker:1 hangs at step 100: in its input, for a lock, or in another collective. HOW"""

import os
import sys
import threading

import tensorflow as tf

from worker_entry import progress

how = sys.argv[1] if os.environ["DISTLAUNCH_TASK"] == "worker:1" else "not"
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def add() -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce("sum", 1.0)


step = tf.function(lambda: strategy.run(add))


def load_batch(number: int) -> int:
    if how == "input" and number == 100:
        threading.Event().wait()
    return number


data = tf.data.Dataset.range(200).map(lambda number: tf.numpy_function(load_batch, [number], tf.int64))
lock = threading.Lock()
for number in data:
    if how == "lock" and number == 100:
        lock.acquire()
        lock.acquire()
    if how == "collective" and number == 100:
        tf.raw_ops.CollectiveReduceV2(
            input=1.0,
            group_size=strategy.num_replicas_in_sync,
            group_key=9999,
            instance_key=9999,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )
    step()
    progress.report()
