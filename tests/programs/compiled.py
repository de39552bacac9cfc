"""Compiles a step with XLA, and prints its result."""

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()


@tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
def compute(x: tf.Tensor) -> tf.Tensor:
    for _ in range(5):
        x = tf.nn.softmax(tf.matmul(x, x)) * tf.sin(x) + tf.reduce_mean(x, axis=-1, keepdims=True)
    return x


print(f"sum {float(tf.reduce_sum(compute(tf.reshape(tf.range(64.0), [8, 8]) / 50))):.6f}")
