"""Measures how fast this node multiplies matrices and copies memory, as a task with this environment will.

The process answers each line of its stdin with a line of JSON, a NodeMeasured, and begins with one that says whether it
can measure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.speed import NodeMeasured

ANSWER_S = 120
"""How long an answer may take: a library or a driver may hang."""
WINDOW_S, WINDOWS = 0.1, 2
"""The best window counts, because other programs disturb a short one seldom. A CPU quota is counted in periods of
0.1 s: a window as long as one has its share of the quota, and a shorter one could miss the quota. A window before them
does not count: it uses up what the quota has saved in idle time, and wakes a processor that saves energy."""
COPIED, PIECE, COPIES = 32 << 20, 1 << 20, 8
"""More than the caches of most processors, in pieces that are copied before another program gets the processor. Of each
piece, the best time counts: a quota shows in the product."""
CPU_SIZE, GPU_SIZE, PYTHON_SIZE = 512, 4096, 40

_Multiply = Callable[[], object]


def main(method: str) -> None:
    """Measures until its stdin ends."""
    signal.alarm(ANSWER_S)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def answer(measured: NodeMeasured) -> None:
        print(json.dumps(asdict(measured)), file=answers, flush=True)

    try:
        label, size, multiply = _METHODS[method]()
        multiply()  # the first one loads and compiles
        source, target = memoryview(bytearray(COPIED)), memoryview(bytearray(COPIED))
        target[:] = source  # gets its pages
    except Exception as error:  # noqa: BLE001 - whatever a library raises, the node cannot be measured
        answer(NodeMeasured(problem=f"{type(error).__name__}: {error}"))
        return
    answer(NodeMeasured(label))

    signal.alarm(0)
    for _ in sys.stdin:
        signal.alarm(ANSWER_S)
        answer(NodeMeasured(label, _count_products(multiply) * 2 * size**3 / 1e9, _copy(source, target) / 1e9))
        signal.alarm(0)


def _copy(source: memoryview, target: memoryview) -> float:
    """Copies it all; returns bytes in a second."""
    best = [float("inf")] * (COPIED // PIECE)
    for _ in range(COPIES):
        for number in range(len(best)):
            place = slice(number * PIECE, (number + 1) * PIECE)
            began = time.perf_counter()
            target[place] = source[place]
            best[number] = min(best[number], time.perf_counter() - began)
    return COPIED / sum(best)


def _count_products(multiply: _Multiply) -> float:
    """How many can be computed in a second."""
    best = 0.0
    for number in range(1 + WINDOWS):
        count, began, now = 0, time.perf_counter(), 0.0
        while now - began < WINDOW_S:
            multiply()
            count, now = count + 1, time.perf_counter()
        best = max(best, count / (now - began)) if number else 0.0
    return best


def _use_tensorflow() -> tuple[str, int, _Multiply]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    size = GPU_SIZE if gpus else CPU_SIZE
    with tf.device("/GPU:0" if gpus else "/CPU:0"):
        matrix = tf.random.uniform((size, size))

        def multiply() -> object:
            return tf.matmul(matrix, matrix)[0, 0].numpy()  # waits for the device

        multiply()
    return f"TensorFlow on {'GPU' if gpus else 'CPU'}", size, multiply


def _use_torch() -> tuple[str, int, _Multiply]:
    import torch  # type: ignore[import-not-found,unused-ignore]

    has_gpu = torch.cuda.is_available()
    size = GPU_SIZE if has_gpu else CPU_SIZE
    matrix = torch.rand(size, size, device="cuda" if has_gpu else "cpu")
    return f"PyTorch on {'GPU' if has_gpu else 'CPU'}", size, lambda: (matrix @ matrix)[0, 0].item()


def _use_numpy() -> tuple[str, int, _Multiply]:
    import numpy as np

    matrix = np.random.default_rng(0).random((CPU_SIZE, CPU_SIZE), dtype=np.float32)
    return "numpy", CPU_SIZE, lambda: matrix @ matrix


def _use_python() -> tuple[str, int, _Multiply]:
    rows = [[float(row + column) for column in range(PYTHON_SIZE)] for row in range(PYTHON_SIZE)]
    columns = [*zip(*rows)]  # noqa: B905 - Python 3.9 knows no `strict`

    def multiply() -> object:
        return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in rows]  # noqa: B905

    # Another Python is another speed, which says nothing of the node.
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}", PYTHON_SIZE, multiply


_METHODS = {"tensorflow": _use_tensorflow, "torch": _use_torch, "numpy": _use_numpy, "python": _use_python}
