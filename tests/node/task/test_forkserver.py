"""Forked tasks behave like tasks in plain Python; where a fork would differ, the task runs in plain Python."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import worker_entry
from tests.harness.apart import linux
from tests.harness.cases import first_quick
from tests.harness.places import PROGRAMS
from tests.harness.processes.forker import Forker
from tests.harness.processes.task_runs import IDENTITY, PROGRAMS_TO_COMPARE, WAYS, Ended, run, write
from tests.harness.witness import await_none_left, make_mark, marked, wait_until
from worker_entry.agent.tasks import forkserver
from worker_entry.program.finding import find_imports, may_import
from worker_entry.program.libraries import libraries_of
from worker_entry.protocol.values import Program

COVERS = ("worker_entry/task", "worker_entry/agent/tasks/forkserver.py")

pytestmark = linux


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    forker = Forker(tmp_path_factory.mktemp("forker") / "early")
    yield forker
    forker.close()


class TestLikePlainPython:
    @pytest.mark.parametrize("name", PROGRAMS_TO_COMPARE)
    def test_a_forked_script_has_the_output_and_status_of_plain_python(
        self, forker: Forker, tmp_path: Path, name: str
    ) -> None:
        write(tmp_path, PROGRAMS_TO_COMPARE[name])
        plain = run(tmp_path, ["program.py"], together=True, env=forker.env)
        assert forker.run(tmp_path, ["program.py"]) == plain

    @pytest.mark.parametrize("way", WAYS)
    def test_a_forked_program_has_the_argv_and_main_module_of_plain_python(
        self, forker: Forker, tmp_path: Path, way: str
    ) -> None:
        write(tmp_path, IDENTITY)
        arguments = [word.replace("{here}", str(tmp_path)) for word in WAYS[way]] + ["a", "b c", "-m", "--help", "é"]
        assert forker.run(tmp_path, arguments) == run(tmp_path, arguments, together=True, env=forker.env)

    def test_a_forked_task_has_its_own_session_and_clean_descriptors_and_signals(
        self, forker: Forker, tmp_path: Path
    ) -> None:
        source = """
            import os, signal, threading, gc
            print(os.getpid() == os.getsid(0) == os.getpgrp())
            print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4], os.readlink("/proc/self/fd/0"))
            print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
            print([signal.getsignal(n) for n in range(1, 32)])
            print([t.name for t in threading.enumerate()], os.environ["DISTLAUNCH_WHO"], os.getcwd())
            print(os.popen("echo $DISTLAUNCH_WHO").read())
        """
        write(tmp_path, source)
        plain = run(tmp_path, ["program.py"], together=True, env={**forker.env, "DISTLAUNCH_WHO": "me"})
        ours = forker.run(tmp_path, ["program.py"], DISTLAUNCH_WHO="me") if not forker.problem else None
        assert ours is not None
        assert ours.stdout.splitlines()[1:] == plain.stdout.splitlines()[1:]
        assert ours.stdout.splitlines()[0] == "True"

    @pytest.mark.parametrize(
        "value", ["random.random()", "uuid.uuid4()", "multiprocessing.current_process().authkey", "os.urandom(8)"]
    )
    def test_random_values_differ_between_forked_tasks(self, forker: Forker, tmp_path: Path, value: str) -> None:
        write(tmp_path, f"import multiprocessing, os, random, uuid; print({value})")
        assert len({forker.run(tmp_path, ["program.py"]).stdout for _ in range(5)}) == 5

    @pytest.mark.slow
    def test_two_hundred_forked_tasks_leak_no_descriptors_memory_or_processes(
        self, forker: Forker, tmp_path: Path
    ) -> None:
        write(tmp_path, "print('done')")
        assert forker.forkserver is not None
        for _ in range(20):
            forker.run(tmp_path, ["program.py"])
        descriptors, memory = forker.forkserver.num_fds(), forker.forkserver.memory_info().rss
        for _ in range(200):
            assert forker.run(tmp_path, ["program.py"]) == Ended(0, "done\n", "")
        assert forker.forkserver.num_fds() == descriptors
        assert forker.forkserver.memory_info().rss < memory + (1 << 20)
        assert forker.forkserver.children(recursive=True) == []
        others = psutil.Process(forker.forkserver.ppid()).children()
        assert [each for each in others if each.status() != psutil.STATUS_ZOMBIE] == [forker.forkserver]


class TestNotForked:
    @pytest.mark.parametrize(
        ("tensorflow", "why"),
        [
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("import sys; sys.exit(3)", "SystemExit: 3"),
            ("import os; os._exit(3)", "the forkserver has exited"),
            ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads"),
        ],
    )
    def test_a_failed_import_in_the_forkserver_is_reported(self, tmp_path: Path, tensorflow: str, why: str) -> None:
        forker = Forker(tmp_path / "early", tensorflow)
        assert why in forker.problem
        (tmp_path / "program.py").write_text("")
        assert why in forker.ask(tmp_path, ["program.py"])[0]["problem"]
        forker.close()

    def test_the_forkserver_imports_preloaded_modules_and_reports_a_missing_one(self, tmp_path: Path) -> None:
        good = Forker(tmp_path / "good", modules=("colorsys", "beside"))
        (tmp_path / "beside.py").write_text("print('imported once')\n")
        (tmp_path / "program.py").write_text(
            "import sys; print('beside' in sys.modules, end=' ')  # and no tensorflow\n"
            "import colorsys, beside; print(sys.path[1])"
        )
        for _ in range(2):  # the output of the import is in the log of the forkserver
            assert good.run(tmp_path, ["program.py"], expected=True).stdout == f"False {tmp_path}/good\n"
        assert (tmp_path / "good" / "forkserver.log").read_text().count("imported once") == 1
        good.close()
        bad = Forker(tmp_path / "bad", modules=("no_such_module",))
        said, _ = bad.ask(tmp_path, ["program.py"], expected=True)
        assert said["problem"] == "ModuleNotFoundError: No module named 'no_such_module'"
        bad.close()

    def test_an_agent_keeps_working_while_the_forkserver_imports_modules(self, tmp_path: Path) -> None:
        forker = Forker(tmp_path / "early", modules=("slow",))
        (tmp_path / "slow.py").write_text("import time; time.sleep(1)")
        (tmp_path / "program.py").write_text("import time, slow; print('done')  # tensorflow")
        said, text = forker.ask(tmp_path, ["program.py"], expected=True)
        assert (said["status"], text) == (0, "done\n")
        assert said["turns"] >= 5  # of at most 0.1 s
        forker.close()

    def test_a_task_with_a_changed_import_variable_is_not_forked(self, forker: Forker, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text("")
        said, _ = forker.ask(tmp_path, ["program.py"], KERAS_BACKEND="jax")
        assert said["problem"].startswith("KERAS_BACKEND differs from its value when TensorFlow was imported")
        said, _ = forker.ask(tmp_path, ["program.py"], CUDA_VISIBLE_DEVICES="1", TF_CONFIG="{}", DISTLAUNCH_TASK="w")
        assert said["status"] == 0

    def test_variables_that_differ_between_processes_of_jax_do_not_prevent_a_fork(self, tmp_path: Path) -> None:
        names = ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS", "KERAS_DISTRIBUTION_PROCESS_ID")
        forker = Forker(tmp_path / "early", framework="jax", files={"jax.py": ""}, env=dict.fromkeys(names, "0"))
        (tmp_path / "program.py").write_text(f"import os, jax; print(*map(os.environ.get, {names}))")
        for value in ("1", "2"):
            _, text = forker.ask(tmp_path, ["program.py"], expected=False, **dict.fromkeys(names, value))
            assert text == " ".join(value * 4) + "\n"
            assert not forker.order_file.exists()
        said, _ = forker.ask(tmp_path, ["program.py"], JAX_PLATFORMS="cpu")
        assert said["problem"] == "JAX_PLATFORMS differs from its value when JAX was imported"
        forker.close()

    def test_a_forked_task_imports_the_installed_worker_entry_despite_a_local_copy(
        self, forker: Forker, tmp_path: Path
    ) -> None:
        """A task in plain Python imports the installed distlaunch too."""
        (tmp_path / "program.py").write_text("import tensorflow, worker_entry; print(worker_entry.__file__)")
        (tmp_path / "worker_entry").mkdir()
        (tmp_path / "worker_entry" / "__init__.py").touch()
        runner = str(Path(worker_entry.__file__).parent)
        by_itself = run(tmp_path, [runner, "run", "program.py"], together=True, env=forker.env)
        assert forker.run(tmp_path, ["program.py"]) == by_itself == Ended(0, f"{worker_entry.__file__}\n", "")

    def test_a_task_with_a_missing_working_directory_is_not_forked(self, forker: Forker, tmp_path: Path) -> None:
        """The agent then starts the task in plain Python, and that reports the error."""
        said, _ = forker.ask(tmp_path / "gone", ["program.py"])
        assert said["problem"] == "the forkserver did not fork"
        (tmp_path / "program.py").write_text("")
        assert forker.ask(tmp_path, ["program.py"])[0]["status"] == 0

    def test_a_local_module_that_shadows_an_imported_one_prevents_a_fork(self, forker: Forker, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text("")
        (tmp_path / "tensorflow").mkdir()
        assert forker.ask(tmp_path, ["program.py"])[0]["status"] == 0  # a plain folder is not a module
        (tmp_path / "tensorflow" / "__init__.py").touch()
        said, _ = forker.ask(tmp_path, ["program.py"])
        assert said["problem"] == f"{tmp_path}/tensorflow shadows a module that is imported already"

    @pytest.mark.parametrize(
        ("files", "may"),
        [
            ({"program.py": "import tensorflow as tf"}, True),
            ({"program.py": "print(1)"}, False),
            ({"program.py": "import model", "model.py": "from keras import layers"}, True),
            ({"program.py": "import model", "model.py": "import json"}, False),
            ({"program.py": "import a.b", "a/__init__.py": "", "a/b.py": "import tf_keras"}, True),
            ({"other.py": ""}, True),  # the file may still appear
        ],
    )
    def test_only_a_program_that_may_import_tensorflow_is_preloaded(
        self, tmp_path: Path, files: dict[str, str], may: bool
    ) -> None:
        for name, source in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(source)
        packages = ("tensorflow", "keras", "tf_keras")
        assert may_import(Program("script", "program.py"), str(tmp_path), packages) is may
        assert may_import(Program("module", "program"), str(tmp_path), packages) is may

    @pytest.mark.parametrize(
        ("source", "named"),
        [
            ("import tensorflow as tf", {"tensorflow"}),
            ("import os, keras, tensorflow", {"keras", "tensorflow"}),
            ("def f():\n    from keras.layers import Dense\n", {"keras"}),
            ("import model", {"keras"}),
            ("# no tensorflow\nimport jax\nprint('import tensorflow')", set()),
            ("import keras_hub, tensorflow_datasets, my.keras\nfrom . import tensorflow", set()),
            ("import tensorflow.data", {"tensorflow"}),
        ],
    )
    def test_import_statements_are_found_in_the_program_and_its_modules(
        self, tmp_path: Path, source: str, named: set[str]
    ) -> None:
        (tmp_path / "program.py").write_text(source)
        (tmp_path / "model.py").write_text("import keras\n")
        assert find_imports(Program("script", "program.py"), str(tmp_path), ("keras", "tensorflow")) == named
        assert libraries_of("tensorflow").find_modules(Program("script", "program.py"), str(tmp_path)) == ["tensorflow"]

    def test_threads_of_scipys_blas_library_do_not_prevent_a_fork_with_keras(self, tmp_path: Path) -> None:
        """Its threads are as many as the machine has cores."""
        threads = "import _thread, time\nfor _ in range(8): _thread.start_new_thread(time.sleep, (60,))\n"
        (tmp_path / "program.py").write_text("import keras\nprint(keras.__name__)")
        for file, problem in (("scipy/linalg.py", ""), ("jax.py", "an import has started threads")):
            files = {"scipy/__init__.py": "", "jax.py": "", "keras.py": "import scipy.linalg", file: threads}
            forker = Forker(tmp_path / file[:3], framework="jax", files=files)
            said, text = forker.ask(tmp_path, ["program.py"], expected=True)
            assert said.get("problem", "").startswith(problem)
            assert bool(problem) or text == "keras\n"
            forker.close()


@pytest.mark.parametrize("entries", ["src", "", ".:src/../src", "src:there"])
def test_a_relative_pythonpath_of_a_forked_task_is_relative_to_its_folder(tmp_path: Path, entries: str) -> None:
    """A transfer may create the folder after the start of the forkserver, and another run may have another folder."""
    project, early = tmp_path / "project", tmp_path / "early"
    paths = f"{early}:{entries}"
    forker = Forker(early, env={"PYTHONPATH": paths}, cwd=project)
    try:
        for folder in (project, tmp_path / "other"):
            for name in ("helper.py", "src/helper.py", "there/helper.py"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text("WHERE = __file__\n")
            (folder / "main").mkdir()
            (folder / "main" / "program.py").write_text(
                "import sys, helper, tensorflow\nprint(helper.WHERE, sys.path)\n"
            )
            plain = run(folder, ["main/program.py"], together=True, env={"PYTHONPATH": paths})
            assert plain.status == 0
            for expected in (True, False):
                assert forker.run(folder, ["main/program.py"], expected=expected, PYTHONPATH=paths) == plain
                assert not forker.order_file.exists()
    finally:
        forker.close()


@pytest.mark.slow
def test_a_suspended_forkserver_is_killed_after_one_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forker = Forker(tmp_path / "early")
    write(tmp_path, "print('here')")
    assert forker.forkserver is not None
    forker.forkserver.suspend()
    assert "does not answer" in forker.ask(tmp_path, ["program.py"])[0]["problem"]
    assert not forker.forkserver.is_running()  # it was killed
    monkeypatch.setattr(forkserver, "FORK_S", 1000.0)
    assert "does not answer" in forker.ask(tmp_path, ["program.py"])[0]["problem"]
    forker.close()


@pytest.mark.parametrize("who", ["agent", "both"])
@pytest.mark.parametrize("lines", first_quick([range(1, 13), range(13, 25), range(25, 37), range(37, 61)]))
def test_no_process_is_left_if_the_agent_dies_anywhere_in_a_fork(tmp_path: Path, who: str, lines: range) -> None:
    """No guardian helps: the new process has to end by itself."""
    marks, processes, folders = [], [], [tmp_path / str(line) for line in lines]
    for line, folder in zip(lines, folders, strict=True):
        folder.mkdir()
        marks.append(make_mark())
        command = [sys.executable, str(PROGRAMS / "adopted_start.py"), str(folder), who, str(line)]
        processes.append(subprocess.Popen(command, env={**os.environ, **marks[-1]}))
    try:
        for folder, process in zip(folders, processes, strict=True):
            is_over = functools.partial(_is_over, folder)
            wait_until(is_over, f"line {folder.name}: neither killed nor started")
            if not (folder / "reached").exists():
                _end_all(marks[folders.index(folder)])  # the fork has fewer lines
            await_none_left(marks[folders.index(folder)], 20, spare=[process.pid])
    finally:
        for process, mark in zip(processes, marks, strict=True):
            process.kill()
            process.wait()
            _end_all(mark)


def _is_over(folder: Path) -> bool:
    """Whether the agent was killed, or the program of the task runs."""
    return (folder / "reached").exists() or (folder / "runs").exists()


def _end_all(mark: dict[str, str]) -> None:
    for process in marked(mark):
        process.kill()
