"""How many healthy runs are stopped as stalled: uneven steps, long callbacks, checkpoints, downloads, compilations.

In each run, all tasks pause for longer than the time after which distlaunch looks at them. The goal is that no run is
stopped. Three programs that do hang show that a stop is possible, and how long it takes.
"""

from __future__ import annotations

import json
import os
import random
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AT_ONCE = 12
"""How many runs share this machine: most of them sleep."""
LONG_S = (12.0, 25.0)
"""The length of a pause."""
KERAS_SHARE = 8
"""One of so many runs trains with Keras, where the others wait for a worker in a collective."""

PLAIN = """
import concurrent.futures, os, queue, random, socket, subprocess, sys, threading, time
from worker_entry import progress

kind, seconds, step_s, port = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
COMPUTE = f"import time\\nwhile time.process_time() < {seconds / 2}: pass"

def compute():
    if os.environ["DISTLAUNCH_TASK"] == "worker:0":  # two would leave no core to the other runs
        return time.sleep(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

def save():
    end = time.monotonic() + seconds
    with open(f"checkpoint-{os.getpid()}", "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(os.urandom(8 << 20))
            os.fsync(file.fileno())
    os.unlink(file.name)

def download():
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"%f" % seconds)
        while connection.recv(1):
            pass

def run(call):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(call).result()

def wait_for_timer():
    done = threading.Event()
    threading.Timer(seconds, done.set).start()
    done.wait()

def wait_in_queue():
    items = queue.Queue()
    threading.Thread(target=lambda: (time.sleep(seconds), items.put(1))).start()
    items.get()

pauses = {
    "uneven": lambda: time.sleep(30 * step_s),
    "sleep": lambda: time.sleep(seconds),
    "compute": compute,
    "save": save,
    "download": download,
    "download in a thread": lambda: run(download),
    "compute in a thread": lambda: run(compute),
    "sleep in a thread": lambda: run(lambda: time.sleep(seconds)),
    "child": lambda: subprocess.run(["sleep", str(seconds)]),
    "computing child": lambda: subprocess.run([sys.executable, "-c", COMPUTE]),
    "timed wait": lambda: threading.Event().wait(seconds),
    "timer": wait_for_timer,
    "queue": wait_in_queue,
    "hang": lambda: threading.Event().wait(),
}
for step in range(1, 81):
    time.sleep(step_s * random.uniform(0.5, 1.5))
    progress.report(step=step)
    if step == 60:
        pauses[kind]()
"""

KERAS = """
import os, sys, threading, time
kind, seconds = sys.argv[1], float(sys.argv[2])
mine = os.environ["DISTLAUNCH_TASK"] == "worker:1"
import keras, numpy as np, tensorflow as tf

def wait(number):
    if mine and number == 700:
        threading.Event().wait() if kind == "keras: hang in the input" else time.sleep(seconds)
    return np.float32(number % 7)

def long_map(number):
    slow = kind in ("keras: slow input", "keras: hang in the input")
    x = tf.ensure_shape(tf.numpy_function(wait, [number], tf.float32), ()) if slow else tf.cast(number % 7, tf.float32)
    return tf.fill((4,), x), tf.fill((1,), x)

class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

    def on_epoch_end(self, epoch, logs=None):
        if kind == "keras: long callback" and mine:
            time.sleep(seconds)
        if kind == "keras: long save" and mine:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.model.save(f"model-{epoch}.keras")
        if kind == "keras: hang in a callback" and mine:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if kind == "keras: compilation" and epoch == 1:
            deep = tf.constant(1.0)
            @tf.function
            def unrolled(x):
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    x = x + 1.0
                return x
            unrolled(deep) if mine else None

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
data = tf.data.Dataset.range(1600).map(long_map).batch(8).with_options(options)
model.fit(data, epochs=3, callbacks=[Pause()], verbose=0)
"""

KINDS = (
    *("uneven", "sleep", "compute", "save", "download", "download in a thread", "compute in a thread"),
    *("sleep in a thread", "child", "computing child", "timed wait", "timer", "queue"),
)
KERAS_KINDS = ("keras: slow input", "keras: long callback", "keras: long save", "keras: compilation")
HANGS = ("hang", "keras: hang in the input", "keras: hang in a callback")


@dataclass(frozen=True)
class Result:
    """`stalled_s`: from the last step to the stop; None if the run was not stopped."""

    kind: str
    outcome: str
    stalled_s: float | None
    looks: int


def measure(runs: int) -> None:
    """Prints a line for each kind of run."""
    print(f"{runs} healthy runs of two tasks with a pause of {LONG_S[0]:.0f} to {LONG_S[1]:.0f} s (goal: no stop)")
    chance = random.Random(runs)
    kinds = [
        KERAS_KINDS[number // KERAS_SHARE % len(KERAS_KINDS)]
        if number % KERAS_SHARE == 0
        else KINDS[number % len(KINDS)]
        for number in range(runs)
    ]
    with tempfile.TemporaryDirectory() as folder, _slow_server() as port, ThreadPoolExecutor(AT_ONCE) as pool:
        for name, source in (("plain.py", PLAIN), ("trains.py", KERAS)):
            (Path(folder) / name).write_text(source)
        chosen = [(kind, chance.uniform(*LONG_S), chance.choice([0.02, 0.1, 0.5])) for kind in kinds]
        results = []
        for result in pool.map(lambda case: _run(Path(folder), port, *case), chosen):
            results.append(result)
            count = sum(each.stalled_s is not None for each in results)
            print(f"{len(results)} runs, {count} stopped", file=sys.stderr)
        hung = [_run(Path(folder), port, kind, 0.0, 0.02) for kind in HANGS]
    for kind in (*KINDS, *KERAS_KINDS):
        of_kind = [result for result in results if result.kind == kind]
        stopped = [result for result in of_kind if result.stalled_s is not None]
        other = [result.outcome for result in of_kind if result.outcome != "succeeded" and result not in stopped]
        looks = statistics.mean(result.looks for result in of_kind) if of_kind else 0
        print(
            f"  {kind:<28} {len(stopped)} of {len(of_kind):>3} stopped{''.join(f'; {end}' for end in other)}; ", end=""
        )
        print(f"said that all tasks wait {looks:.1f} times")
    print(f"  {'all':<28} {sum(result.stalled_s is not None for result in results)} of {len(results):>3} stopped")
    for result in hung:
        took = "not stopped" if result.stalled_s is None else f"stopped {result.stalled_s:.1f} s after the last step"
        print(f"  {result.kind:<28} {took}")


def _run(folder: Path, port: int, kind: str, seconds: float, step_s: float) -> Result:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        program, rest = ("trains.py", []) if kind.startswith("keras") else ("plain.py", [str(step_s), str(port)])
        command = [
            sys.executable,
            "-m",
            "launcher",
            "local",
            "-n",
            "2",
            "--run-dir",
            "run",
            str(folder / program),
            kind,
        ]
        done = subprocess.run(
            [*command, str(seconds), *rest], cwd=own, capture_output=True, text=True, check=False, env={**os.environ}
        )
        report = json.loads((Path(own) / "run" / "report.json").read_text())
    verdict = report["attempts"][0]["verdict"]["reference"]
    is_stopped = verdict in ("stalled", "start-timeout", "drain-timeout")
    stalled_s = report["goodput"]["stalled_s"] if is_stopped else None
    outcome = report["outcome"] if report["outcome"] == "succeeded" else f"{verdict}: {done.stderr[-300:]!r}"
    return Result(kind, outcome, stalled_s, done.stderr.count("and all tasks wait"))


class _Slow(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        time.sleep(float(self.request.recv(100)))


@contextmanager
def _slow_server() -> Iterator[int]:
    """A server that says nothing for as long as it is asked to."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
