"""Python processes that a task starts get the same patches and reports as the task; others are unaffected."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.harness.processes.children import run_python, told
from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/children", "worker_entry/task", "worker_entry/hooks")

FIT = """
import os, sys
import numpy as np, keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((32, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)
print("trained", strategy.num_replicas_in_sync, flush=True)
if "fail" in sys.argv:
    raise ValueError("after training")
"""
START_FIT = """
import subprocess, sys
subprocess.run([sys.executable, "fit.py", *sys.argv[1:]], check=True)
"""
LOADS = """
import multiprocessing, keras
def load():
    from keras.src.backend.tensorflow import trainer
    print("patched" if hasattr(trainer.reduce_per_replica, "__wrapped__") else "not patched", flush=True)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=load)
    child.start()
    child.join()
"""


class TestTrainingInChildren:
    def test_training_in_a_python_command_is_patched_and_counted(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "fit.py").write_text(FIT)
        ran = distlaunch("local", "-n", "2", "--", sys.executable, "fit.py")
        assert ran.status == 0, ran.stderr
        self.assert_trained(ran)

    def test_training_in_a_child_process_is_counted_and_its_failure_reported(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        """The user's own sitecustomize also runs in that process."""
        (tmp_path / "fit.py").write_text(FIT)
        (tmp_path / "start.py").write_text(START_FIT)
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "sitecustomize.py").write_text("import sys; print('own sitecustomize', flush=True)")
        ran = distlaunch("local", "-n", "2", "start.py", "fail", env={"PYTHONPATH": str(tmp_path / "own")})
        assert ran.status == 1
        assert f"ValueError: after training   {tmp_path}/fit.py:12" in ran.stderr
        self.assert_trained(ran)
        for task in ("worker-0", "worker-1"):
            assert ran.log(task).count(b"own sitecustomize") == 2  # in the task and in its child

    def assert_trained(self, ran: Any) -> None:
        for number in (0, 1):
            assert ran.line("trained 2", f"worker-{number}")
            assert ran.log(f"worker-{number}").count(b"distlaunch: patched Keras") == 1
            assert ran.report["attempts"][0]["tasks"][number]["progress"]["step"] == 12

    def test_a_multiprocessing_child_is_patched_without_repeating_the_patch_note(self, tmp_path: Path) -> None:
        (tmp_path / "loads.py").write_text(LOADS)
        config = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
        output, errors = run_python("loads.py", env={**told(), "TF_CONFIG": config}, cwd=tmp_path)
        assert output == "patched\n"
        assert errors.count("distlaunch: patched Keras") == 1

    def test_keras_is_not_patched_if_the_order_disables_it(self) -> None:
        config = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
        _, errors = run_python("-c", "import keras", env={**told(patch_keras=False), "TF_CONFIG": config})
        assert "distlaunch: patched Keras" not in errors
