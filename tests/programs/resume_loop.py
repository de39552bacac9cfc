"""A custom loop with tf.train.CheckpointManager; worker:1 fails in epoch 3: EPOCHS (kill | term | handler)."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

from worker_entry import progress

epochs, how = int(sys.argv[1]), sys.argv[2]
task, attempt = os.environ["DISTLAUNCH_TASK"], int(os.environ["DISTLAUNCH_ATTEMPT"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight, epoch = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
    done = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(weight=weight, epoch=epoch, done=done)
shared = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "loop")
chief = task == "worker:0"
# As in TensorFlow's guide: every worker saves, and only the chief's checkpoint is kept.
manager = tf.train.CheckpointManager(checkpoint, str(shared) if chief else tempfile.mkdtemp(), max_to_keep=2)
handler = None
if how != "kill":
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, checkpoint_dir=str(shared)
    )
elif (latest := tf.train.latest_checkpoint(str(shared))) is not None:
    checkpoint.restore(latest)
print(f"begins at epoch {int(epoch.numpy()) + 1}, step {int(done.numpy())}", flush=True)


reduce = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)))


def step() -> None:
    weight.assign_add(strategy.experimental_local_results(reduce())[0])
    done.assign_add(1)


for number in range(int(done.numpy()), epochs * 10):
    if attempt == 1 and task == "worker:1" and number == 25 and how != "handler":
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGTERM)
    if handler is not None:
        handler.run(step)
    else:
        step()
    progress.report(step=number + 1, epoch=number // 10 + 1)
    if number % 10 == 9:
        epoch.assign_add(1)
        print(f"epoch {int(epoch.numpy())} done", flush=True)
        if handler is None:
            manager.save()
print(f"weight {float(weight.numpy())}, steps {int(done.numpy())}", flush=True)
