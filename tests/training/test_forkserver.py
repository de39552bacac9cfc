"""Forked tasks behave like tasks in plain Python; where a fork would differ, the task runs in plain Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil

from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import assert_none_left, make_mark, wait_until

COVERS = ("worker_entry/task", "worker_entry/agent/tasks/forkserver.py")

pytestmark = linux

KERAS = str(PROGRAMS / "train_keras.py")


class TestForkedClusters:
    def test_seeded_training_of_forked_tasks_matches_unforked_tasks(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        """Slow: two clusters train one after the other."""
        program = tmp_path / "seeded.py"
        program.write_text(
            "import keras, sys, worker_entry.demo.train as demo\n"
            "keras.utils.set_random_seed(7)\nsys.argv[1:] = ['--epochs', '3']\ndemo.main()\n"
        )
        said = []
        for number, option in enumerate(([], ["--set", "preload=false"])):
            directory = tmp_path / str(number)
            ran = distlaunch("local", "-n", "2", *option, "--run-dir", str(directory), str(program))
            assert ran.status == 0, ran.stderr
            assert (directory / "forkserver.log").exists() is not bool(option)
            log = (directory / "attempt-1" / "worker-0.log").read_text()
            said.append(re.findall(r"(?:accuracy|loss): [\d.]+|validation accuracy [\d.]+", log))
        assert len(said[0]) > 6
        assert said[0] == said[1]

    def test_forked_workers_share_no_random_numbers_or_threads(self, warm: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "draw.py").write_text(
            "early = 'forkserver' in open('/proc/self/cmdline').read()\n"
            "import random, threading, numpy as np, tensorflow as tf, keras\n"
            "numbers = [random.random(), np.random.rand(), tf.random.uniform([]), keras.random.uniform([])]\n"
            "print('drawn', early, threading.active_count(), *map(float, numbers))\n"
        )
        ran = warm("local", "-n", "2", "draw.py", "--set", "timeouts.start_s=60")
        assert ran.status == 0, ran.stderr
        logs = [ran.log(f"worker-{number}").decode() for number in range(2)]
        drawn = [re.findall(r"^drawn True 1 (.*) (.*) (.*) (.*)$", log, re.MULTILINE)[0] for log in logs]
        assert all(one != other for one, other in zip(*drawn, strict=True))

    def test_the_forkserver_starts_64_tasks_on_one_node(self, warm: Distlaunch, tmp_path: Path) -> None:
        """Slow: each task takes a quarter of a second of CPU."""
        (tmp_path / "trivial.py").write_text("import tensorflow\nprint(tensorflow.__version__)\n")
        mark = make_mark()
        ran = warm("local", "-n", "64", "--oversubscribe", "trivial.py", env=mark)
        assert ran.status == 0, ran.stderr
        assert "  64 tasks: exit status 0\n" in ran.stderr
        assert_none_left(mark)

    def test_one_forkserver_serves_all_attempts(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        mark = make_mark()
        faults = ("--chaos", "kill:worker:1@step=30", "--chaos", "kill:worker:0@step=50")
        ran = distlaunch("local", "-n", "2", *faults, KERAS, "nobody", "resume", "5", env=mark)
        assert ran.status == 0, ran.stderr
        assert len(ran.report["attempts"]) == 3
        assert "not forked" not in ran.stderr
        assert_none_left(mark)
        starts = (ran.directory / "forkserver.log").read_text().count("oneDNN custom operations")
        assert starts in (0, 1, 2)  # lines of one import, not of three

    def test_a_killed_forkserver_is_restarted_for_the_next_attempt(self, tmp_path: Path) -> None:
        """Slow: TensorFlow is imported twice, and both attempts train."""
        mark = make_mark()
        command = distlaunch_command(
            "local", "-n", "2", "--run-dir", "run", "--max-restarts", "1", KERAS, "nobody", "x"
        )
        with (tmp_path / "stderr").open("wb") as stderr:
            process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **mark}, stderr=stderr)
        with process:
            try:
                status = tmp_path / "run" / "attempt-1" / "worker-1.status.json"
                wait_until(lambda: status.exists() and '"first_step": 1' in status.read_text(), "it trains")
                below = psutil.Process(process.pid).children(recursive=True)
                forkserver, *tasks = [each for each in below if each.cmdline()[-1:] == ["forkserver"]]
                assert (forkserver.pid, len(tasks)) == (min(each.pid for each in (forkserver, *tasks)), 2)
                forkserver.kill()
                time.sleep(1)
                gone = [task for task in tasks if not task.is_running()]
                logs = [(tmp_path / f"run/attempt-1/worker-{index}.log").read_text() for index in (0, 1)]
                assert not gone, [gone, (tmp_path / "stderr").read_text(), *logs]
                tasks[0].kill()
                second = tmp_path / "run" / "attempt-2" / "worker-1.status.json"
                wait_until(lambda: second.exists() and '"first_step": 1' in second.read_text(), "it trains again")
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            finally:
                process.kill()
        assert "not forked" not in (tmp_path / "stderr").read_text()
        assert_none_left(mark)
