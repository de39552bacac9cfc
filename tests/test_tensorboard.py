"""TensorBoard beside a run, and its profiler: real ones, of a real cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.background import BackgroundRun
from tests.conftest import distlaunch_command
from tests.witness import make_mark, marked, wait_until

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"),
]

DEMO = ["-m", "worker_entry.demo.train", "--epochs"]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[BackgroundRun]:
    mark = make_mark()

    def popen(argv: list[str], stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **mark},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )

    run = BackgroundRun(folder, "local", arguments, popen)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(30)
    wait_until(lambda: marked(mark) == [], "nothing is left, TensorBoard included")


def address_of(run: BackgroundRun) -> str:
    run.wait_until_said("TensorBoard is at http://")
    found = re.search(r"TensorBoard is at (http://127\.0\.0\.1:\d+/)", run.said)
    assert found is not None
    return found[1]


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def test_it_shows_what_each_worker_writes_and_ends_with_the_run(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2", "--tensorboard", *DEMO, "30") as run:
        address = address_of(run)
        wait_until(lambda: {"worker-0/train", "worker-1/train"} <= set(ask(f"{address}data/runs")), "it shows both", 60)
        assert run.end() == 0, run.said
    assert "tensorboard:0" not in run.said.replace("tensorboard:0  ", "")
    assert "0 processes left on this machine" in run.said


def test_it_stays_after_the_training_if_it_is_to_until_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--keep-tensorboard", *DEMO, "1") as run:
        address = address_of(run)
        run.wait_until_said("The training is over; TensorBoard stays until Ctrl-C")
        wait_until(lambda: "worker-0/train" in ask(f"{address}data/runs"), "it shows the worker", 60)
        run.process.send_signal(signal.SIGINT)
        assert run.end(30) == 0, run.said
    assert run.report["outcome"] == "succeeded"


def test_one_that_cannot_start_is_told_and_the_tasks_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "tensorboard"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ModuleNotFoundError('not here')\n")
    done = subprocess.run(
        distlaunch_command("local", "-n", "1", "--run-dir", "run", "--tensorboard", "--", "sleep", "3"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "TensorBoard ended with exit status 1; the tasks go on, and tensorboard-0.log says why\n" in done.stderr
    assert "ModuleNotFoundError: not here" in (tmp_path / "run" / "attempt-1" / "tensorboard-0.log").read_text()


def test_a_profile_has_the_workers_of_a_cluster(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2", *DEMO, "200") as run:
        run.wait_for(b"Epoch 3/200", 0)
        done = subprocess.run(
            distlaunch_command("profile", "run", "--duration", "2"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = [Path(line) for line in done.stdout.splitlines()]
        # TensorFlow may leave a worker out; then that is told.
        assert len(files) == 2 or done.stderr == "Warning: only 1 of 2 workers had something to show\n"
        for file in files:
            assert file.is_relative_to(tmp_path / "run" / "tensorboard")
            assert planes_of(file)
        assert run.process.poll() is None  # it goes on


def planes_of(file: Path) -> list[str]:
    """The names of what was captured, as TensorFlow itself reads them."""
    script = (
        "import sys\nfrom tensorflow.tsl.profiler.protobuf import xplane_pb2\n"
        "space = xplane_pb2.XSpace()\nspace.ParseFromString(open(sys.argv[1], 'rb').read())\n"
        "print(*(plane.name for plane in space.planes if plane.lines), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_cannot_be_profiled_is_told(tmp_path: Path) -> None:
    subprocess.run(distlaunch_command("local", "-n", "1", "--run-dir", "run", "--", "true"), cwd=tmp_path, check=True)
    done = subprocess.run(
        distlaunch_command("profile", "run"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"Error: the run {tmp_path}/run is over" in done.stderr
