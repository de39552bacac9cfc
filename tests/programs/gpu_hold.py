"""Computes on the GPU until the file UNTIL exists: FRAMEWORK (jax | tensorflow | torch), MIB of memory, UNTIL."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

framework, mib, until = sys.argv[1:]
side = int((int(mib) * 2**20 / 4) ** 0.5)  # of a matrix of 32-bit numbers
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"


def use_jax() -> tuple[int, Any, Callable[[Any], None]]:
    import jax

    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return (
        len(gpus),
        jax.numpy.ones((side, side)),
        lambda matrix: (matrix[:4096] @ matrix[:, :4096]).block_until_ready(),
    )


def use_tensorflow() -> tuple[int, Any, Callable[[Any], None]]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return len(gpus), tf.ones((side, side)), lambda matrix: (matrix[:4096] @ matrix[:, :4096]).numpy()


def use_torch() -> tuple[int, Any, Callable[[Any], None]]:
    import torch

    def compute(matrix: Any) -> None:
        (matrix[:4096] @ matrix[:, :4096]).sum().item()

    return torch.cuda.device_count(), torch.ones((side, side), device="cuda"), compute


count, matrix, compute = {"jax": use_jax, "tensorflow": use_tensorflow, "torch": use_torch}[framework]()
compute(matrix)
print(f"computes on {count} GPU, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
while not os.path.exists(until):
    compute(matrix)
    time.sleep(0.001)
