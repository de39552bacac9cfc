"""Measures how fast a task with this environment can multiply matrices and copy memory on this node.

The process first prints a line of JSON, a NodeMeasured that says whether it can measure. Then it answers each line of
its stdin with another NodeMeasured.
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
"""The longest time that an answer may take, because a library or a driver may hang."""
WINDOW_S, WINDOWS = 0.1, 2
"""The best window counts, because other programs rarely disturb a short window. A CPU quota applies to periods of
0.1 s: a window of this length gets its share of the quota, but a shorter window could miss the quota's effect. An extra
window before the others does not count: it uses up the quota saved in idle time, and wakes a processor that saves
energy."""
COPIED, PIECE, COPIES = 32 << 20, 1 << 20, 8
"""More than the caches of most processors hold, in pieces that are copied before another program gets the processor.
The best time of each piece counts; the matrix products show the effect of a quota."""
CPU_SIZE, GPU_SIZE, PYTHON_SIZE = 512, 4096, 40

_Multiply = Callable[[], object]


def main(method: str) -> None:
    """Measures until stdin ends."""
    signal.alarm(ANSWER_S)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def answer(measured: NodeMeasured) -> None:
        print(json.dumps(asdict(measured)), file=answers, flush=True)

    try:
        label, size, multiply = _METHODS[method]()
        multiply()  # the first product loads and compiles
        source, target = memoryview(bytearray(COPIED)), memoryview(bytearray(COPIED))
        target[:] = source  # allocates its pages
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
    """Copies all pieces; returns the bytes per second."""
    best = [float("inf")] * (COPIED // PIECE)
    for _ in range(COPIES):
        for number in range(len(best)):
            place = slice(number * PIECE, (number + 1) * PIECE)
            began = time.perf_counter()
            target[place] = source[place]
            best[number] = min(best[number], time.perf_counter() - began)
    return COPIED / sum(best)


def _count_products(multiply: _Multiply) -> float:
    """The number of products per second."""
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
    columns = [*zip(*rows)]  # noqa: B905 - Python 3.9 has no `strict`

    def multiply() -> object:
        return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in rows]  # noqa: B905

    # Another Python version has another speed, which says nothing about the node.
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}", PYTHON_SIZE, multiply


_METHODS = {"tensorflow": _use_tensorflow, "torch": _use_torch, "numpy": _use_numpy, "python": _use_python}
