"""A healthy run is not stopped: a task at work, and tasks that train separately, are reported and left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.processes.at_work import write
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.warm_python import WarmPython

COVERS = ("launcher/gang", "worker_entry/agent/tasks/stacks.py", "worker_entry/agent/tasks/watches.py")

pytestmark = pytest.mark.slow  # each waits for several seconds

SOON = """
import launcher.cli.main
from launcher.gang.watch import stalls
stalls.LONG_S, stalls.ACTIVE_S, stalls.RECHECK_S = 10.0, 0.5, 2.0
launcher.cli.main.main()
"""
"""distlaunch that lets tasks wait for 10 s instead of 120 s, and looks at tasks at work again after 2 s, not 30 s."""


def run_soon(python: WarmPython, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = python.command("local", "--run-dir", str(folder / "run"), *arguments, launcher=("-c", SOON))
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_workers_that_use_a_single_process_strategy_are_reported_once(distlaunch: Distlaunch, tmp_path: Path) -> None:
    source = """
        import tensorflow as tf
        strategy = tf.distribute.MirroredStrategy()
        while time.monotonic() < began + 4:
            strategy.run(lambda: tf.constant(1) + 1)
    """
    # Without an early import the tasks themselves import TensorFlow, which counts as work however long it takes.
    ran = distlaunch(
        "local", "-n", "2", "--set", "timeouts.start_s=3", "--set", "preload=false", write(tmp_path, source)
    )
    assert ran.status == 0, ran.stderr
    separate = "worker:0, worker:1 train separately: the program uses MirroredStrategy, not"
    assert ran.stderr.count(separate) == 1


class TestOwnConfig:
    """The program changes TF_CONFIG as in plain Python; TensorFlow gets the cluster's, unless the user opts out."""

    SOURCE = """
        import json, multiprocessing, subprocess
        from unittest import mock
        import tensorflow as tf

        NAME = "TF_CONFIG"
        ours = os.environ[NAME]

        def workers():
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            return len(resolver.cluster_spec().as_dict().get("worker", []))

        def child():
            return subprocess.run(["printenv", NAME], capture_output=True, text=True).stdout.strip()

        with mock.patch.dict(os.environ, {"A": "b"}, clear=True):
            print("cleared", sorted(os.environ), workers())
        print("restored", os.environ[NAME] == ours == child())
        task = {"type": "worker", "index": 0}
        os.environ[NAME] = json.dumps({"cluster": {"worker": ["a:1", "b:2", "c:3"]}, "task": task})
        print("set", os.environ[NAME] == child(), workers())
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print("forked", pool.apply(workers))
        del os.environ[NAME]
        print("removed", NAME in os.environ, repr(child()), workers())
    """

    @pytest.mark.parametrize(
        ("options", "seen"),
        [
            ((), [2, 2, 2]),
            (
                (
                    "--set",
                    "keep_own_tf_config=true",
                ),
                [0, 3, 0],
            ),
        ],
    )
    def test_keep_own_tf_config_selects_the_tf_config_that_tensorflow_uses(
        self, warm: Distlaunch, tmp_path: Path, options: tuple[str, ...], seen: list[int]
    ) -> None:
        program = write(tmp_path, self.SOURCE)
        ran = warm("local", "-n", "2", *options, program)
        assert ran.status == 0, ran.stderr
        for task in ("worker:0", "worker:1"):
            assert [line.partition(" │ ")[2] for line in ran.stdout.splitlines() if line.startswith(task)] == [
                f"cleared ['A'] {seen[0]}",
                "restored True",
                f"set True {seen[1]}",
                "forked 3",
                f"removed False '' {seen[2]}",
            ]
        lines = Path(program).read_text().splitlines()
        place = f"{program}:{next(number for number, line in enumerate(lines, 1) if 'patch.dict' in line)}"
        said = f"uses the program's TF_CONFIG ({place})" if options else f"changes TF_CONFIG at {place};"
        assert ran.stderr.count(said) == 1

    def test_a_slurm_cluster_resolver_in_the_program_is_reported(self, warm: Distlaunch, tmp_path: Path) -> None:
        """In a Slurm job, each task may take itself for the only one, and train alone.

        Each has a port of its own: at the usual port, one task would reach the other's server, and fail.
        """
        source = """
            import socket
            import tensorflow as tf
            with socket.create_server(("localhost", 0)) as server:
                here = {"port_base": server.getsockname()[1], "gpus_per_node": 1, "auto_set_gpu": False}
            resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(**here)
            strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
            print(strategy.num_replicas_in_sync)
        """
        job = {"JOB_ID": "7", "PROCID": "0", "NTASKS": "1", "STEP_NUM_TASKS": "1", "STEP_NODELIST": "localhost"}
        env = {f"SLURM_{name}": value for name, value in {**job, "STEP_TASKS_PER_NODE": "1"}.items()}
        program = write(tmp_path, source)
        ran = warm("local", "-n", "2", program, env=env)
        assert ran.status == 0, ran.stderr
        assert ran.line("1", "worker-0")
        assert ran.line("1", "worker-1")
        number = next(n for n, line in enumerate(Path(program).read_text().splitlines(), 1) if "Slurm" in line)
        said = f" builds SlurmClusterResolver at {program}:{number}, which does not find this cluster: "
        assert ran.stderr.count(said) == 1

    def test_setting_an_equal_tf_config_is_not_reported(self, warm: Distlaunch, tmp_path: Path) -> None:
        source = """
            import tensorflow as tf
            os.environ["TF_CONFIG"] = os.environ.pop("TF_CONFIG")
            print(tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id)
        """
        ran = warm("local", "-n", "2", write(tmp_path, source))
        assert sorted(ran.stdout.splitlines()) == ["worker:0 │ 0", "worker:1 │ 1"]
        assert "TF_CONFIG" not in ran.stderr


class TestStall:
    def test_a_slow_callback_is_reported_but_does_not_end_the_run(
        self, warm_python: WarmPython, tmp_path: Path
    ) -> None:
        source = """
            import keras, numpy as np, tensorflow as tf
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            class Slow(keras.callbacks.Callback):
                def on_epoch_end(self, epoch, logs=None):
                    if mine and epoch == 0:
                        time.sleep(16)
            data = tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1)))).batch(8)
            # Dropping an iterator may block for as long as it has lived, and at most for a minute: less than 120 s,
            # but more than the limit here. Its cause is the thread that optimizes the pipeline.
            options = tf.data.Options()
            options.autotune.enabled = False
            model.fit(data.with_options(options), epochs=2, callbacks=[Slow()], verbose=0)
        """
        program = write(tmp_path, source)
        ran = run_soon(warm_python, tmp_path, "-n", "2", program)
        assert ran.returncode == 0, ran.stderr
        assert f"worker:1 has been in on_epoch_end at {program}:" in ran.stderr
        assert "; worker:0 waits\n" in ran.stderr
        assert "The cluster makes progress again\n" in ran.stderr

    def test_a_cluster_of_only_waiting_tasks_is_reported_as_stalled(
        self, warm_python: WarmPython, tmp_path: Path
    ) -> None:
        source = """
            import tensorflow as tf
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            add = lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0)
            step = tf.function(lambda: strategy.run(add))
            for number in range(200):
                if mine and number == 100:
                    threading.Event().wait()
                step()
                progress.report()
        """
        ran = run_soon(warm_python, tmp_path, "-n", "2", write(tmp_path, source))
        assert ran.returncode == 3, ran.stderr
        assert "[stalled]" in ran.stderr
