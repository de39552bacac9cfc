"""Trains with Keras on JAX, and prints what a forked process may share with others: [NAME=VALUE of a variable…].

Sets the variables in a way that the source does not show.
"""

import os
import random
import sys
from pathlib import Path

vars(os)["environ"].update(word.split("=", 1) for word in sys.argv[1:])
forked = "forkserver" in Path("/proc/self/cmdline").read_text()
has_tensorflow = "libtensorflow_framework" in Path("/proc/self/maps").read_text()

import jax  # noqa: E402 - after the variables that the import reads
import keras  # noqa: E402
import numpy as np  # noqa: E402

print("start", forked, has_tensorflow, "tensorflow" in sys.modules)
print("parent", os.getppid())
jax.distributed.initialize()
number = jax.process_index()
print("place", number, jax.process_count(), os.environ["JAX_PROCESS_ID"], os.environ["DISTLAUNCH_TASK"])
print("settings", jax.local_device_count(), jax.numpy.ones(1, float).dtype, os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
print("drawn", random.random(), np.random.rand(), float(keras.random.uniform([])))

keras.utils.set_random_seed(3)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.rand(32, 3)[number::2]
history = model.fit(x, x.sum(1, keepdims=True), batch_size=4, epochs=3, verbose=0)
print("losses", *history.history["loss"])
