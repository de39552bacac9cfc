"""Code that a program runs before it imports TensorFlow works in a forked task as in plain Python."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.apart import linux
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.forker import Forker
from tests.harness.processes.task_runs import Ended, run

COVERS = ("worker_entry/task", "worker_entry/program")

pytestmark = linux

REAL = {
    "devices and threads": """
        import tensorflow as tf
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices([], "GPU")
        cpu, = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
        print(tf.config.list_logical_devices(), tf.config.get_visible_devices())
        print(float(tf.reduce_sum(tf.ones([9, 9]))), tf.config.threading.get_intra_op_parallelism_threads())
        print(tf.config.threading.get_inter_op_parallelism_threads(), tf.config.list_physical_devices())
    """,
    "logging that is configured first": """
        import logging
        logging.basicConfig(format="%(name)s|%(levelname)s|%(message)s", level=logging.INFO)
        import tensorflow as tf
        tf.get_logger().warning("once")
        logging.getLogger("mine").info("mine")
        print(logging.root.handlers, tf.get_logger().handlers, tf.get_logger().propagate, tf.get_logger().level)
    """,
    "logging that is configured later": """
        import tensorflow as tf
        import logging
        tf.get_logger().setLevel("INFO")
        tf.get_logger().info("once")
        logging.basicConfig(format="%(name)s|%(message)s")
        tf.get_logger().warning("twice, since both have a handler")
        from absl import logging as absl_logging
        absl_logging.info("not shown")
        absl_logging.warning("shown")
        print(logging.root.handlers, tf.get_logger().handlers, logging.getLoggerClass())
    """,
    "a stream that is replaced first": """
        import sys
        class Tee:
            def __init__(self, stream): self.stream = stream
            def write(self, text): return self.stream.write(text.upper())
            def flush(self): self.stream.flush()
        sys.stderr = Tee(sys.stderr)
        import tensorflow as tf
        tf.get_logger().warning("through the program's own stream")
    """,
    "filters of warnings, a locale and a recursion limit": """
        import decimal, locale, signal, sys, warnings
        locale.setlocale(locale.LC_ALL, "C")
        sys.setrecursionlimit(1234)
        decimal.getcontext().prec = 7
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        warnings.filterwarnings("error", category=UserWarning)
        import tensorflow as tf, numpy
        print([(f[0], f[1] and f[1].pattern, f[2].__name__, f[4]) for f in warnings.filters])
        warnings.resetwarnings()
        warnings.warn("shown")
        print(locale.setlocale(locale.LC_ALL), sys.getrecursionlimit(), decimal.Decimal(1) / 3)
        print(signal.getsignal(signal.SIGUSR1))
    """,
    "variables that no import reads, and those that imports set": """
        import os
        os.environ["WANDB_PROJECT"] = os.environ["CUDA_VISIBLE_DEVICES"] = "".join("-1")
        before = {*os.environ}
        import tensorflow, keras, numpy, h5py
        print(sorted({*os.environ} - before), {k: os.environ.get(k) for k in ("TF2_BEHAVIOR", "HDF5_PLUGIN_PATH")})
        print(os.environ["WANDB_PROJECT"], os.environ["CUDA_VISIBLE_DEVICES"], keras.backend.backend())
    """,
    "modules imported before TensorFlow": """
        import sys
        names = ("tensorflow", "keras", "numpy", "h5py", "absl", "six", "google.protobuf", "PIL", "wrapt", "requests")
        print([name in sys.modules for name in names])
        import h5py
        print([name in sys.modules for name in names])
        from absl import flags
        print([name in sys.modules for name in names])
        import importlib.util
        print(importlib.util.find_spec("tensorflow").origin, importlib.util.find_spec("keras").name)
        print("tensorflow" in sys.modules)
        import keras
        print([name in sys.modules for name in names])
        import tensorflow.keras.layers, google.protobuf.message
        print([name in sys.modules for name in names], tensorflow.__spec__, keras.__loader__.name, h5py.__spec__.name)
    """,
    "pickles and processes": """
        import multiprocessing, pickle, sys
        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
        print(sys.modules.get("__mp_main__") in (None, sys.modules["__main__"]))
        class Own: pass
        def double(x): return 2 * x
        if __name__ == "__main__":
            import tensorflow as tf, numpy as np
            print(pickle.loads(pickle.dumps((np.arange(3), tf.constant(4), Own()))))
            with multiprocessing.Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "Keras alone": """
        from keras import ops, layers
        import keras, sys
        print(float(ops.sum(ops.ones(3))), keras.config.backend(), "tensorflow" in sys.modules)
        print(layers.Dense(2)(ops.ones((1, 3))).shape)
    """,
    "an import within a function, an exception and a lazy module": """
        def use():
            import tensorflow as tf
            return tf.keras.layers.Dense(1), tf.compat.v1.logging
        try:
            import no_such_module_of_tensorflow
        except ImportError as error:
            print(error)
        print(*use())
        import tensorflow.no_such_module
    """,
    "a configuration that disables all known loggers": """
        import logging.config
        print(sorted(logging.root.manager.loggerDict), len(logging._handlerList))
        known = {"version": 1, "loggers": {"absl": {"level": "INFO"}, "h5py.of_mine": {"level": "INFO"}}}
        logging.config.dictConfig(known)
        quiet = logging.getLogger("urllib3.connectionpool")
        quiet.setLevel("ERROR")
        print(logging.getLogger("h5py.of_mine").parent.name, quiet.isEnabledFor(logging.WARNING))
        import tensorflow as tf
        logging.root.setLevel("DEBUG")
        tf.get_logger().warning("shown")
        loggers = logging.root.manager.loggerDict
        for name in sorted(loggers):
            if isinstance(loggers[name], logging.Logger):
                one = loggers[name]
                print(name, one.disabled, one.level, one.parent.name, one.isEnabledFor(10))
        import logging
        print(logging.getLogger("urllib3.connectionpool") is quiet, quiet.parent.name)
    """,
    "loggers of modules that are used later": """
        import asyncio, logging  # and not yet tensorflow
        print(logging.getLogger("asyncio").isEnabledFor(logging.DEBUG))
        logging.getLogger().setLevel(logging.DEBUG)
        print(logging.getLogger("asyncio").isEnabledFor(logging.DEBUG), asyncio.log.logger.parent)
    """,
    "a folder for temporary files": """
        import os, tempfile
        from unittest import mock
        print(tempfile.tempdir)
        with mock.patch.dict(os.environ, TMPDIR=os.getcwd()):
            print(tempfile.gettempdir(), os.path.dirname(tempfile.mkdtemp()))
        import keras
        print(tempfile.tempdir)
    """,
    "exit handlers": """
        import atexit, multiprocessing, sys
        atexit.register(print, "registered first")
        import tensorflow as tf
        from absl import app
        atexit.register(lambda: print("registered last", float(tf.reduce_sum(tf.ones(3)))))
        before = atexit._ncallbacks()
        import keras
        print(atexit._ncallbacks() - before)
    """,
    "process identity": """
        import logging, multiprocessing.process, os, threading, time
        main = threading.main_thread()
        print(main.native_id == os.getpid() == threading.get_native_id(), main.ident == threading.get_ident())
        with open("/proc/self/stat") as stream:
            began = int(stream.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        print(logging.makeLogRecord({}).relativeCreated / 1000 < time.clock_gettime(time.CLOCK_BOOTTIME) - began + 0.1)
        print(multiprocessing.process.ORIGINAL_DIR == os.getcwd(), multiprocessing.parent_process())
        print(time.tzname, time.localtime(0).tm_hour, time.process_time() < 30)
        import tensorflow
        import linecache
        print(len(linecache.cache) < 100)
    """,
}
"""Programs for the real TensorFlow, whose import must see the environment of the program."""
CHANGED_IMPORTS = {
    "a module that is missing on purpose": """
        import sys
        sys.modules["h5py"] = None
        import keras
        from keras.src.saving import saving_lib
        print(getattr(saving_lib, "h5py", None))
    """,
    "a replaced module": """
        import sys, types
        own = sys.modules["opt_einsum"] = types.ModuleType("opt_einsum")
        import tensorflow
        print(sys.modules["opt_einsum"] is own)
    """,
    "a finder that refuses a module": """
        import sys
        class Finder:
            def find_spec(name, path=None, target=None):
                if name == "h5py":
                    raise ImportError("no h5py here")
        sys.meta_path.insert(0, Finder)
        import keras
        print("h5py" in sys.modules)
    """,
}
"""Programs that change what the import of TensorFlow finds: they have to start again."""
CHATTER = re.compile(r"[IWE]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log|To enable the following")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("real") / "early", None)
    yield forker
    forker.close()


def readable(ended: Ended, folder: Path) -> Ended:
    """Removes parts that differ between two plain starts: chatter, the folder, and addresses in memory."""
    lines = [line for line in ended.stdout.splitlines(keepends=True) if not CHATTER.match(line)]
    text = "".join(lines).replace(str(folder), "")
    return Ended(ended.status, re.sub(r"0x[0-9a-f]+", "0x…", text), ended.stderr)


@pytest.mark.parametrize("name", REAL)
def test_a_forked_program_with_tensorflow_behaves_as_in_plain_python(real: Forker, tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(REAL[name]))
    plain = run(tmp_path, ["program.py"], together=True, env=real.env)
    assert readable(real.run(tmp_path, ["program.py"], expected=True), tmp_path) == readable(plain, tmp_path)
    assert not real.order_file.exists()  # it was forked and did not start again


@pytest.mark.parametrize("name", CHANGED_IMPORTS)
def test_a_program_that_replaces_modules_of_tensorflow_runs_unforked(real: Forker, tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(CHANGED_IMPORTS[name]))
    plain = run(tmp_path, ["program.py"], together=True, env=real.env)
    assert plain.status == 0
    assert readable(real.run(tmp_path, ["program.py"]), tmp_path) == readable(plain, tmp_path)
    assert json.loads(real.order_file.read_text())["not_forked"]


def test_tensorflow_variables_set_by_the_script_do_not_prevent_forking(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nos.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\nimport tensorflow\n"
        "print('forked' if 'forkserver' in open('/proc/self/cmdline').read() else 'plain')\n"
    )
    ran = distlaunch("local", "-n", "2", "program.py")
    assert ran.status == 0, ran.stderr
    assert "early import" not in ran.stderr
    assert [ran.line("forked", f"worker-{task}")[0] for task in (0, 1)] == ["forked", "forked"]
    assert "oneDNN custom operations" not in (ran.directory / "forkserver.log").read_text()
