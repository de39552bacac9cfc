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
from tests.harness.processes.task_runs import run
from worker_entry.program.environment import find_program_env
from worker_entry.program.import_variables import ProgramEnv
from worker_entry.protocol.values import Program

COVERS = ("worker_entry/task", "worker_entry/program")

pytestmark = linux

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
"""Programs for a fake TensorFlow that prints its environment; each sets variables in a different way."""


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


@pytest.mark.parametrize("name", FAKE)
def test_an_early_tensorflow_import_sees_the_variables_set_by_the_program(
    fake: Forker, tmp_path: Path, name: str
) -> None:
    (tmp_path / "program.py").write_text(f"{FAKE[name]}\n{textwrap.dedent(LOOK)}")
    (tmp_path / "settings.py").write_text('import os\nos.environ["TF_SET_ELSEWHERE"] = "1"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorflow.py").write_text("SEEN = {'TF_OTHER': __file__}\nprint('imported')\n")
    plain = run(tmp_path, ["program.py"], together=True, env=fake.env)
    assert plain.status == 0
    assert "imported" in plain.stdout
    assert fake.run(tmp_path, ["program.py"]) == plain
    assert json.loads(fake.order_file.read_text())["not_forked"]


@pytest.fixture(scope="module")
def fake_jax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    files = {
        "jaxlib.py": "",
        "jax.py": "import os, jaxlib\nSEEN = dict(os.environ)\nos.environ.get('JAX_ENABLE_X64')\n"
        "os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')\nprint('imported')\n",
        "keras.py": "import os, jax\nBACKEND = os.environ.get('KERAS_BACKEND')\n",
    }
    forker = Forker(tmp_path_factory.mktemp("fake-jax") / "early", framework="jax", files=files)
    yield forker
    forker.close()


@pytest.mark.parametrize("library", ["jax", "keras"])
@pytest.mark.parametrize(
    ("name", "again"),
    [
        *(("JAX_ENABLE_X64", True), ("XLA_FLAGS", True), ("TF_CPP_MIN_LOG_LEVEL", True), ("KERAS_BACKEND", True)),
        *(("JAX_PROCESS_ID", False), ("MINE", False)),
    ],
)
def test_an_early_jax_import_sees_the_variables_set_by_the_program(
    fake_jax: Forker, tmp_path: Path, library: str, name: str, again: bool
) -> None:
    """`again`: whether the program starts again as plain Python."""
    (tmp_path / "program.py").write_text(
        f"import os; vars(os)['environ']['{name}'] = 'x'\n"
        f"import {library}\nimport jax, keras\n"
        "read = ('JAX_ENABLE_X64', 'XLA_FLAGS', 'TF_CPP_MIN_LOG_LEVEL')\n"
        "print(*map(jax.SEEN.get, read), keras.BACKEND, os.environ['TF_CPP_MIN_LOG_LEVEL'])\n"
    )
    plain = run(tmp_path, ["program.py"], together=True, env=fake_jax.env)
    ran = fake_jax.run(tmp_path, ["program.py"], expected=True)
    assert fake_jax.order_file.exists() is again
    assert ran.stdout == (plain.stdout if again else plain.stdout.replace("imported\n", ""))


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
def test_variables_set_before_the_tensorflow_import_are_found_in_the_source(
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


def test_variables_of_a_folder_program_are_found_in_its_main_module(tmp_path: Path) -> None:
    """The `.env` file comes from the nearest folder above the program that has one."""
    (tmp_path / ".env").write_text("TF_OF_DOTENV=1\n")
    folder = tmp_path / "project" / "program"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text('import os; os.environ["TF_A"] = "1"; load_dotenv()\n')
    for program in (Program("script", "program"), Program("module", "program")):
        found = find_program_env(program, str(tmp_path / "project"), {}, ("tensorflow",))
        assert (found.changes, [*found.unclear]) == ({"TF_A": "1"}, ["TF_OF_DOTENV"])


def test_a_missing_env_file_sets_no_variables(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("load_dotenv()\n")
    found = find_program_env(Program("script", "program.py"), str(tmp_path), {}, ("tensorflow",))
    assert found == ProgramEnv()


def test_a_run_reports_once_why_tasks_are_not_forked_and_remembers_it(distlaunch: Distlaunch, tmp_path: Path) -> None:
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
    assert ["with 0", "plain"] in first  # the other worker may have been stopped earlier
    assert second == [["with 0", "plain"]] * 2


def test_interpreter_options_and_a_sitecustomize_take_effect_in_forked_tasks(tmp_path: Path) -> None:
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
