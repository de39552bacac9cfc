"""The GitHub Action tests a real program: its summary, its page and its status are those of the command."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.action import run_test_step

COVERS = (
    "launcher/proof",
    "launcher/python/resume_test.py",
    "launcher/cli/resume_test.py",
    "launcher/exporters/page_writing.py",
    "worker_entry/task/trace.py",
    "worker_entry/task/saves.py",
)

PROGRAM = """
import os, sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(1).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1))).batch(16)
backup = keras.callbacks.BackupAndRestore(os.path.join(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "backup"))
model.fit(data, epochs=int(sys.argv[1]), verbose=0, callbacks=[backup])
"""


def test_the_action_writes_the_summary_and_the_page_of_a_tested_program(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "my train.py").write_text(PROGRAM)
    done = run_test_step(folder, {"program": "'my train.py' 3", "faults": "quick"}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr

    facts = dict(line.split("=", 1) for line in (tmp_path / "runner" / "output").read_text().splitlines())
    page = Path(facts["folder"]) / "resume.html"
    assert done.stdout.splitlines()[-2:] == ["Resume is exact after 3 faults", f"Page: {page}"]
    assert (tmp_path / "runner" / "summary").read_text() == "".join(
        f"    {line}\n" for line in done.stdout.splitlines()
    )
    assert "<title>Resume is exact after 3 faults: my train.py 3</title>" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    proof = json.loads(page.with_suffix(".json").read_text())
    assert (proof["exact"], proof["steps"], len(proof["results"])) == (True, 12, 3)
    assert [path.name for path in folder.iterdir()] == ["my train.py"]
