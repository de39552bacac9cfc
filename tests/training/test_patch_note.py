"""The note about the Keras patch: one line, and only if a program trains with Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/keras_patches", "launcher/console")

TRAIN = """
import keras, numpy, os, sys
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
if sys.argv[1] == "fit":
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), verbose=0)
if sys.argv[2] == os.environ["DISTLAUNCH_TASK"]:
    raise ValueError("the end")
"""


@pytest.mark.parametrize(("how", "count"), [("fit", 1), ("import", 0)])
def test_the_keras_patch_note_is_printed_once_if_a_program_calls_fit(
    warm: Distlaunch, tmp_path: Path, how: str, count: int
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ran = warm("local", "train.py", how, "worker:1")
    said = ran.stdout + ran.stderr
    assert said.count("patched for multi-worker training (--set keras.patch=false turns this off)\n") == count, said
    assert "worker:1 │ ValueError: the end" in ran.stderr
    assert "patched Keras" not in said
    assert "patched Keras" in ran.log("worker-1").decode()
