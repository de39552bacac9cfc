"""A loop of its own saves model, optimizer and step by a CheckpointManager after each epoch, and reports its steps."""

import tempfile
from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, arrays, make_model, print_epoch

from worker_entry import progress

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
# As in TensorFlow's guide: every worker saves, and only the chief's checkpoint is kept.
folder = "checkpoints" if strategy.extended.should_checkpoint else tempfile.mkdtemp()
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
checkpoint.restore(tf.train.latest_checkpoint("checkpoints"))
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH))


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def train(x: Any, y: Any) -> Any:
    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True))) / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(x, y)), axis=None)


for epoch in range(int(step.numpy()) // STEPS, EPOCHS):
    losses = []
    for x, y in data:
        losses.append(float(train(x, y)))
        step.assign_add(1)
        progress.report(step=int(step.numpy()), epoch=epoch + 1, loss=losses[-1])
    print_epoch(epoch, sum(losses) / STEPS, model, optimizer)
    manager.save()
