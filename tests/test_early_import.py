"""Code that a program runs before it imports TensorFlow works in a forked task as in plain Python."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apart import linux
from tests.conftest import Distlaunch
from tests.harness.forker import Forker
from tests.harness.task_runs import Ended, run
from worker_entry.program.environment import find_program_env
from worker_entry.program.import_variables import ProgramEnv
from worker_entry.protocol.values import Program

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
    "the process that it is": """
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
    "a module of its own": """
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

LOOK = """
    import os, tensorflow
    print({name: value for name, value in tensorflow.SEEN.items() if name.startswith(("TF_", "KERAS_", "MPL"))})
"""
FAKE = {
    "a constant": 'import os; os.environ["KERAS_BACKEND"] = "jax"',
    "several": 'import os\nos.environ.update({"TF_A": "1", "TF_B": "2"}, TF_C="3")\nos.environ.setdefault("TF_D", "4")',
    "one that is removed": 'import os; os.environ.pop("TF_GIVEN"); os.environ.pop("TF_ABSENT", None)',
    "one that is deleted": 'from os import environ\ndel environ["TF_GIVEN"]',
    "one that only the program knows": 'import os, sys; os.environ["TF_PID"] = str(len(sys.argv))',
    "one of many": 'import os\nfor n in range(2):\n    os.environ[f"TF_{n}"] = "x"',
    "one in a condition": 'import os, sys\nif len(sys.argv) == 1:\n    os.environ["TF_USE_LEGACY_KERAS"] = "1"',
    "one in a function": 'import os\ndef prepare():\n    os.environ["TF_DETERMINISTIC_OPS"] = "1"\nprepare()',
    "one in a module": "import settings",
    "one set by a tool": 'import os\nvars(os)["environ"].__setitem__("TF_ENABLE_ONEDNN_OPTS", "0")',
    "one that only Python code reads": 'import os; vars(os)["environ"]["MPLBACKEND"] = "agg"',
    "one after NumPy": 'import numpy, os; os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"',
    "another TensorFlow": 'import os, sys; sys.path.insert(0, os.getcwd() + "/other")',
}
"""Programs for a fake TensorFlow that prints its environment; each sets variables in another way."""


CHATTER = re.compile(r"[IWE]\d{4} |\d{4}-\d\d-\d\d |WARNING: All log|To enable the following")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("real") / "early", None)
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    tensorflow = """
        import os
        SEEN = dict(os.environ)
        os.environ.get("MPLBACKEND"), os.environ.get("KERAS_BACKEND")
        print("imported")
    """
    folder = tmp_path_factory.mktemp("fake") / "early"
    forker = Forker(folder, textwrap.dedent(tensorflow), env={"TF_GIVEN": "1"})
    yield forker
    forker.close()


def readable(ended: Ended, folder: Path) -> Ended:
    """Removes parts that differ between two plain starts: chatter, the folder, and addresses in memory."""
    lines = [line for line in ended.stdout.splitlines(keepends=True) if not CHATTER.match(line)]
    text = "".join(lines).replace(str(folder), "")
    return Ended(ended.status, re.sub(r"0x[0-9a-f]+", "0x…", text), ended.stderr)


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", REAL)
def test_the_real_tensorflow_sees_the_programs_environment(real: Forker, tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(REAL[name]))
    plain = run(tmp_path, ["program.py"], together=True, env=real.env)
    assert readable(real.run(tmp_path, ["program.py"], expected=True), tmp_path) == readable(plain, tmp_path)
    assert not real.order_file.exists()  # it was forked and did not start again


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", CHANGED_IMPORTS)
def test_an_import_finds_the_modules_that_the_program_has_put_in_place(real: Forker, tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(CHANGED_IMPORTS[name]))
    plain = run(tmp_path, ["program.py"], together=True, env=real.env)
    assert plain.status == 0
    assert readable(real.run(tmp_path, ["program.py"]), tmp_path) == readable(plain, tmp_path)
    assert json.loads(real.order_file.read_text())["not_forked"]


@pytest.mark.parametrize("name", FAKE)
def test_an_import_sees_the_variables_of_the_program(fake: Forker, tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(f"{FAKE[name]}\n{textwrap.dedent(LOOK)}")
    (tmp_path / "settings.py").write_text('import os\nos.environ["TF_SET_ELSEWHERE"] = "1"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorflow.py").write_text("SEEN = {'TF_OTHER': __file__}\nprint('imported')\n")
    plain = run(tmp_path, ["program.py"], together=True, env=fake.env)
    assert plain.status == 0
    assert "imported" in plain.stdout
    assert fake.run(tmp_path, ["program.py"]) == plain
    assert json.loads(fake.order_file.read_text())["not_forked"]


@pytest.mark.parametrize(
    ("source", "changes", "unclear"),
    [
        ('import os; os.environ["TF_A"] = "1"\nimport tensorflow', {"TF_A": "1"}, []),
        ('import os, tensorflow; os.environ["TF_A"] = "1"', {}, []),
        ('from os import environ as e, environ\nenviron["TF_A"] = "1"', {"TF_A": "1"}, []),
        ('import os; os.environ["TF_A"] = str(2)', {"TF_A": "2"}, []),
        (
            'import os; os.environ.setdefault("TF_A", "2"); os.environ.setdefault("TF_GIVEN", "3")',
            {"TF_A": "2", "TF_GIVEN": "1"},
            [],
        ),
        (
            'import os; os.putenv("TF_A", "2"); os.environ.update({"TF_B": "1"}, TF_C="x")',
            {"TF_A": "2", "TF_B": "1", "TF_C": "x"},
            [],
        ),
        ('import os; os.environ |= {"TF_A": "2"}; del os.environ["TF_GIVEN"]', {"TF_A": "2", "TF_GIVEN": None}, []),
        ('import os; gone = os.environ.pop("TF_GIVEN", None)', {"TF_GIVEN": None}, []),
        ('import os\nif __name__ == "__main__":\n    os.environ["TF_A"] = "1"\n', {"TF_A": "1"}, []),
        (
            'import os\ntry:\n    import yaml\nexcept ImportError:\n    pass\nelse:\n    os.environ["TF_A"] = "1"\n',
            {"TF_A": "1"},
            [],
        ),
        ("import settings\nimport tensorflow", {"TF_SET": "1"}, []),
        ("from settings import x\nfrom keras import layers", {"TF_SET": "1"}, []),
        ('import os, sys\nif sys.argv:\n    os.environ["TF_A"] = "1"\n', {}, ["TF_A"]),
        ('import os, sys\nos.environ["TF_A"] = sys.argv[1]\n', {}, ["TF_A"]),
        ('import os, sys\nos.environ["WANDB_NAME"] = os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]\n', {}, []),
        ('import os\ndef f():\n    os.environ["TF_A"] = "1"\n', {}, []),
        ('import os\nfor name in "TF_A", "TF_B":\n    os.environ[name] = os.environ["TF_C"] = "1"\n', {}, ["TF_C"]),
        ('import os\nwith open("x") as file:\n    os.environ["TF_A"] = "1"\n', {"TF_A": "1"}, []),
        ("import os\nos.environ.clear()\nimport tensorflow", {}, ["TF_GIVEN"]),
        ("import os\nos.environ.update(dict(os.environ), **{'TF_A': '1'})\nimport tensorflow", {}, []),
        ("import around\nimport tensorflow", {"TF_AROUND": "1"}, []),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport tensorflow", {}, ["TF_OF_DOTENV"]),
        ('import tensorflow as tf\nimport os\nos.environ["TF_A"] = "1"', {}, []),
        ("def f(:", {}, []),
    ],
)
def test_variables_are_found_in_the_source_of_a_program(
    tmp_path: Path, source: str, changes: dict[str, str], unclear: list[str]
) -> None:
    (tmp_path / "program.py").write_text(source)
    (tmp_path / "settings.py").write_text('import os\nos.environ["TF_SET"] = "1"\nx = 1\n')
    (tmp_path / "around.py").write_text('import program, os\nos.environ["TF_AROUND"] = "1"\n')
    (tmp_path / ".env").write_text('# settings\nTF_OF_DOTENV="1"\nexport MINE=2\n')
    packages = ("tensorflow", "keras")
    for program in (Program("script", "program.py"), Program("module", "program")):
        found = find_program_env(program, str(tmp_path), {"TF_GIVEN": "1"}, packages)
        assert (found.changes, [*found.unclear]) == (changes, unclear)


def test_the_source_of_a_folder_program_is_its_main_module(tmp_path: Path) -> None:
    """The `.env` file comes from the nearest folder above the program that has one."""
    (tmp_path / ".env").write_text("TF_OF_DOTENV=1\n")
    folder = tmp_path / "project" / "program"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text('import os; os.environ["TF_A"] = "1"; load_dotenv()\n')
    for program in (Program("script", "program"), Program("module", "program")):
        found = find_program_env(program, str(tmp_path / "project"), {}, ("tensorflow",))
        assert (found.changes, [*found.unclear]) == ({"TF_A": "1"}, ["TF_OF_DOTENV"])


def test_a_missing_env_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("load_dotenv()\n")
    found = find_program_env(Program("script", "program.py"), str(tmp_path), {}, ("tensorflow",))
    assert found == ProgramEnv()


def test_a_run_reports_once_that_tasks_start_again_and_remembers_it(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "tensorflow.py").write_text(
        "import os; print('with', os.environ.get('TF_ENABLE_ONEDNN_OPTS'))"
    )
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "def prepare():\n    os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\n"
        "prepare()\nimport tensorflow\n"
        "print('forked' if 'forkserver' in open('/proc/self/cmdline').read() else 'plain')\n"
        "from worker_entry import progress\n"
        "progress.report()\n"
        "sys.exit(int(os.environ['DISTLAUNCH_ATTEMPT']) < 2)\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "early")}
    ran = distlaunch("local", "-n", "2", "--max-restarts", "1", "program.py", env=env)
    assert ran.status == 0, ran.stderr
    why = "the program sets TF_ENABLE_ONEDNN_OPTS before it imports tensorflow"
    assert ran.stderr.count(why) == 1
    first, second = (
        [
            re.findall("^(plain|forked|with .*)$", log.read_text(), re.MULTILINE)
            for log in sorted((ran.directory / f"attempt-{attempt}").glob("worker-*.log"))
        ]
        for attempt in (1, 2)
    )
    assert ["with 0", "plain"] in first  # the other worker may have been stopped before
    assert second == [["with 0", "plain"]] * 2


@pytest.mark.tensorflow
def test_variables_that_a_program_sets_visibly_do_not_prevent_forking(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nos.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\nimport tensorflow\n"
        "print('forked' if 'forkserver' in open('/proc/self/cmdline').read() else 'plain')\n"
    )
    ran = distlaunch("local", "-n", "2", "program.py")
    assert ran.status == 0, ran.stderr
    assert "early import" not in ran.stderr
    assert [ran.line("forked", f"worker-{task}")[0] for task in (0, 1)] == ["forked", "forked"]
    assert "oneDNN custom operations" not in (ran.directory / "forkserver.log").read_text()


def test_options_of_the_interpreter_and_a_sitecustomize_have_their_effect(tmp_path: Path) -> None:
    """The options come from variables: a program with `-W` or `-X` is a command, and commands are not forked."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.CUSTOMIZED = 'yes'\n")
    env = {
        "PYTHONPATH": f"{tmp_path}/early:{tmp_path}/site",
        "PYTHONWARNINGS": "error::UserWarning,ignore::DeprecationWarning",
        "PYTHONDEVMODE": "1",
        "PYTHONHASHSEED": "7",
        "LC_ALL": "C.UTF-8",
    }
    forker = Forker(tmp_path / "early", "import warnings; warnings.simplefilter('once', FutureWarning)\n", env=env)
    (tmp_path / "program.py").write_text(
        "import locale, sys, warnings\n"
        "print(CUSTOMIZED, sys.warnoptions, sys._xoptions, sys.flags.dev_mode, hash('a'))\n"
        "import tensorflow\nprint([entry[:3] for entry in warnings.filters], locale.getpreferredencoding())\n"
        "warnings.warn('as an error')\n"
    )
    plain = run(tmp_path, ["program.py"], together=True, env=forker.env)
    assert plain.stdout.startswith("yes ")
    assert plain.status == 1
    assert forker.run(tmp_path, ["program.py"], expected=True) == plain
    assert not forker.order_file.exists()
    forker.close()
