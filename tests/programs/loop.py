"""A custom loop that reports its steps. TASK skips one, so that all workers wait for each other: TASK HOW."""

import os
import sys
import time
from pathlib import Path

import tensorflow as tf

from worker_entry import progress

culprit, how = sys.argv[1:3]
odd = os.environ["DISTLAUNCH_TASK"] == culprit
strategy = tf.distribute.MultiWorkerMirroredStrategy()


step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))


def wait_for_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / os.environ["DISTLAUNCH_TASK"]).touch()
    while len(list(folder.iterdir())) < strategy.num_replicas_in_sync:
        time.sleep(0.1)


for number in range(1, 201):
    if odd and how == "skip-a-step" and number == 130:
        continue
    step()
    progress.report(step=number, epoch=(number - 1) // 50 + 1, loss=tf.constant(1.0 / number), nothing=float("nan"))
wait_for_all(Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "ended"))
print("done", flush=True)
