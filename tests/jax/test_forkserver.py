"""Tasks that are forked with JAX imported behave like tasks in plain Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.harness.apart import linux
from tests.harness.places import PROGRAMS, ROOT
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import PYTHON, make_python, write_spec
from tests.harness.processes.warm_python import end_waiting
from tests.harness.witness import assert_none_left, await_none_left, make_mark

COVERS = (
    "worker_entry/task",
    "worker_entry/agent/tasks/forkserver.py",
    "worker_entry/agent/warm",
    "worker_entry/program",
    "worker_entry/hooks/jax_cluster.py",
)

pytestmark = linux

PROGRAM = str(PROGRAMS / "forked_jax.py")


def run_python(source: str) -> list[str]:
    """The lines that the Python with JAX prints, with JAX as the backend of Keras."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "jax"}
    done = subprocess.run([PYTHON, "-c", source], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def lines(directory: Path, word: str, *, attempt: int = 1) -> list[list[str]]:
    """For each worker, the words after this one in the only line of its log that begins with it."""
    found = []
    for path in sorted((directory / f"attempt-{attempt}").glob("worker-*.log")):
        [line] = [line for line in path.read_text().splitlines() if line.startswith(f"{word} ")]
        found.append(line.split()[1:])
    return found


class TestImports:
    """What makes a fork after the imports safe."""

    def test_the_imports_of_jax_and_keras_leave_no_threads_descriptors_or_backend(self) -> None:
        assert run_python("""if True:
            import os, sys
            import numpy, scipy.linalg  # the threads of their BLAS libraries survive a fork
            def state():
                return len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd"))
            before = state()
            import jax, keras, jax._src.xla_bridge as bridge
            print(state() == before, bridge.backends_are_initialized(), "tensorflow" in sys.modules)
            jax.devices()
            print(state() == before, bridge.backends_are_initialized())
        """) == ["True False False", "False True"]

    def test_the_imports_read_none_of_the_variables_that_differ_between_tasks(self) -> None:
        said = run_python("""if True:
            from worker_entry.program.import_variables import LATE
            from worker_entry.task.early_import import EarlyImport
            early = EarlyImport()
            for name in ("jax", "keras", "tensorflow"):
                early.load(name)
            print({*early.reads} & {*LATE}, {"JAX_PLATFORMS", "JAX_ENABLE_X64", "KERAS_BACKEND"} <= {*early.reads})
        """)
        assert said[-1] == "set() True"

    def test_a_preloaded_module_that_runs_jax_prevents_a_fork(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("import jax.numpy as jnp\nONE = jnp.ones(1)\n")
        (tmp_path / "program.py").write_text(
            "print('start', b'forkserver' in open('/proc/self/cmdline', 'rb').read())\nimport mine\n"
        )
        ran = distlaunch("up", write_spec(tmp_path, "program.py", rest="preload: [mine]\n# of jax"))
        assert ran.status == 0, ran.stderr
        assert lines(ran.directory, "start") == [["False"]] * 2
        assert "not forked from a preloaded JAX: an import has started JAX's backend" in ran.stderr


class TestForkedClusters:
    def test_forked_tasks_form_a_cluster_and_train_as_unforked_ones(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        """Slow: two clusters train one after the other."""
        losses = []
        for forked in (True, False):
            rest = f"preload: {str(forked).lower()}\n"
            folder = tmp_path / str(forked)
            ran = distlaunch("up", write_spec(tmp_path, PROGRAM, rest=rest), "--run-dir", str(folder))
            assert ran.status == 0, ran.stderr
            assert "not forked" not in ran.stderr
            assert lines(folder, "start") == [[str(forked), "False", "False"]] * 2
            assert lines(folder, "place") == [["0", "2", "0", "worker:0"], ["1", "2", "1", "worker:1"]]
            assert all(one != other for one, other in zip(*lines(folder, "drawn"), strict=True))
            losses.append(lines(folder, "losses"))
        assert losses[0] == losses[1]
        assert losses[0][0] == losses[0][1]
        assert len(losses[0][0]) == 3

    def test_settings_that_only_the_running_program_makes_take_effect(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        # Only a forkserver that may be needed again makes distlaunch say why it is not used.
        rest = "restart: {max_restarts: 1}\n"
        settings = ("XLA_FLAGS=--xla_force_host_platform_device_count=2", "JAX_ENABLE_X64=1", "TF_CPP_MIN_LOG_LEVEL=2")
        ran = distlaunch("up", write_spec(tmp_path, PROGRAM, *settings, rest=rest))
        assert ran.status == 0, ran.stderr
        assert lines(ran.directory, "settings") == [["2", "float64", "2"]] * 2
        assert lines(ran.directory, "start") == [["False", "False", "False"]] * 2
        assert ran.stderr.count("the program sets JAX_ENABLE_X64 before it imports jax") == 1, ran.stderr

    def test_a_program_that_imports_tensorflow_as_well_gets_all_three_imported(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "program.py").write_text(
            "maps = open('/proc/self/maps').read()\n"
            "print('start', 'libtensorflow_framework' in maps, 'libjax_common' in maps)\n"
            "import os, tensorflow as tf\nimport keras\nimport jax\n"
            "jax.distributed.initialize()\nkeras.utils.set_random_seed(3)\n"
            "keras.distribution.set_distribution(keras.distribution.DataParallel())\n"
            "data = tf.data.Dataset.from_tensor_slices(([[1.0]] * 8, [[2.0]] * 8)).batch(4)\n"
            "model = keras.Sequential([keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\n"
            "print('losses', keras.backend.backend(), *model.fit(data, verbose=0).history['loss'])\n"
        )
        ran = distlaunch("up", write_spec(tmp_path, "program.py"))
        assert ran.status == 0, ran.stderr
        assert lines(ran.directory, "start") == [["True", "True"]] * 2
        first, second = lines(ran.directory, "losses")
        assert first[0] == "jax"
        assert first == second

    def test_one_import_serves_all_attempts(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(
            "import os, sys\nprint('start', b'forkserver' in open('/proc/self/cmdline', 'rb').read())\n"
            "import jax, keras, beside\njax.distributed.initialize()\nfrom worker_entry import progress\n"
            "progress.report()\nprint('place', jax.process_index(), jax.process_count())\n"
            "jax.experimental.multihost_utils.sync_global_devices('all')\n"
            "sys.exit(os.environ['DISTLAUNCH_ATTEMPT'] == '1')\n"
        )
        (tmp_path / "beside.py").write_text("import jax.experimental.multihost_utils\nprint('imported')\n")
        mark = make_mark()
        rest = "preload: [beside]\nrestart: {max_restarts: 1}\n"
        ran = distlaunch("up", write_spec(tmp_path, "program.py", rest=rest), env=mark)
        assert ran.status == 0, ran.stderr
        for attempt in (1, 2):
            assert lines(ran.directory, "start", attempt=attempt) == [["True"]] * 2
            assert lines(ran.directory, "place", attempt=attempt) == [["0", "2"], ["1", "2"]]
        assert (ran.directory / "forkserver.log").read_text().count("imported") == 1
        assert_none_left(mark)


def test_the_next_run_uses_a_jax_that_was_kept_warm(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """Slow: two runs, the first of which only imports JAX, with an interpreter that no other test uses."""
    python, mark = make_python(tmp_path / "python"), make_mark()
    (tmp_path / "first.py").write_text("import os, jax\nprint('start', os.getppid())\n")
    rest = "keep_warm_s: 60\n"
    try:
        first = distlaunch("up", write_spec(tmp_path, "first.py", rest=rest, python=python), env=mark)
        assert first.status == 0, first.stderr
        assert "kept warm for" in first.stderr
        parents = lines(first.directory, "start")
        folder = tmp_path / "second"
        spec = write_spec(tmp_path, PROGRAM, rest=rest, python=python)
        second = distlaunch("up", spec, "--run-dir", str(folder), env=mark)
        assert second.status == 0, second.stderr
        assert "imports JAX again" not in second.stderr
        assert lines(folder, "start") == [["True", "False", "False"]] * 2
        assert lines(folder, "parent") == parents
    finally:
        end_waiting(python)
        await_none_left(mark)
