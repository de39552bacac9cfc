"""Trains with Keras on PyTorch, any number of processes: DATA (arrays | dataset | loader) HOW (none | raise | kill).

The last process fails in the first attempt, in the third epoch. Each process continues from a backup of its own.
"""

import os
import signal
import sys

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

data, how = sys.argv[1:]
keras.distribution.initialize()
# Keras gives each process its part of a PyDataset; arrays and loaders must be such a part.
distribution = keras.distribution.DataParallel(auto_shard_dataset=data == "dataset")
keras.distribution.set_distribution(distribution)
rank: int = torch.distributed.get_rank()
processes: int = torch.distributed.get_world_size()
assert (rank, processes) == (distribution.data_shard_id, distribution.num_processes)
SIZE = 32 // processes  # of one process's batch
BATCHES = 8

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32 * BATCHES, 4)).astype("float32")
y = x.sum(1, keepdims=True)
mine = np.arange(len(x)).reshape(BATCHES, processes, SIZE)[:, rank].ravel()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    def __len__(self) -> int:
        return BATCHES * processes

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * SIZE, (index + 1) * SIZE)
        return x[part], y[part]


class Failure(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.epoch = epoch
        print("begins epoch", epoch + 1, flush=True)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if (rank, self.epoch, batch, os.environ["DISTLAUNCH_ATTEMPT"]) == (processes - 1, 2, 3, "1"):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("batch 3 has no label")


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
backup = keras.callbacks.BackupAndRestore(f"{os.environ['DISTLAUNCH_CHECKPOINT_DIR']}/{rank}")
given = {"epochs": 4, "verbose": 0, "callbacks": [backup, Failure()]}
if data == "arrays":
    history = model.fit(x[mine], y[mine], batch_size=SIZE, shuffle=False, **given)
elif data == "dataset":
    history = model.fit(Batches(), shuffle=False, **given)
else:
    parts = TensorDataset(torch.from_numpy(x[mine]), torch.from_numpy(y[mine]))
    history = model.fit(DataLoader(parts, SIZE), shuffle=False, **given)
weights = sum(float(np.abs(each).sum()) for each in model.get_weights())
print("ends with", weights, *history.history["loss"], *history.history["mae"], flush=True)
