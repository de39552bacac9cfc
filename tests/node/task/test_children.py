"""Python processes that a task starts get the same patches and reports as the task; others are unaffected."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.places import ROOT
from tests.harness.processes.children import run_python, told
from tests.harness.processes.commands import Distlaunch
from worker_entry.agent.tasks.status_reader import StatusFiles
from worker_entry.protocol.child_order import FOLDER
from worker_entry.protocol.environment import CHILDREN as VARIABLE
from worker_entry.protocol.file_names import AttemptFiles

COVERS = ("worker_entry/children", "worker_entry/task", "worker_entry/hooks")


class TestEnvironment:
    def test_the_hook_folder_precedes_the_pythonpath_of_the_user(self) -> None:
        assert told({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{FOLDER}:/a:/b"
        assert told({"PYTHONPATH": f"{FOLDER}:/a"})["PYTHONPATH"] == f"{FOLDER}:/a"

    def test_an_empty_pythonpath_adds_no_working_directory_for_child_processes(self) -> None:
        assert told()["PYTHONPATH"] == told({"PYTHONPATH": ""})["PYTHONPATH"] == FOLDER

    def test_child_processes_get_no_hook_without_patches_and_progress(self) -> None:
        env = {"PYTHONPATH": "/a", VARIABLE: "of another task"}
        assert told(env, patch_keras=False, progress=False) == {"PYTHONPATH": "/a"}

    def test_child_processes_do_not_get_the_crash_and_status_files_of_the_task(self) -> None:
        files: Any = {"crash_file": "/crash", "status_file": "/status", "child_file": "/child"}
        assert "/crash" not in told(**files)[VARIABLE]
        assert "/status" not in told(**files)[VARIABLE]
        assert "/child" in told(**files)[VARIABLE]


class TestStart:
    def test_a_child_python_without_tensorflow_imports_only_the_hook(self) -> None:
        source = "import sys; print(sorted(sys.modules))"
        before, after = (set(ast.literal_eval(run_python("-c", source, env=env)[0])) for env in ({}, told()))
        assert after - before <= {"sitecustomize", "distlaunch_children", "__future__"}

    def test_the_hook_folder_is_passed_on_but_not_visible_in_sys_path(self) -> None:
        source = "import os, sys; print([*sys.path, os.environ['PYTHONPATH']])"
        *path, handed_on = ast.literal_eval(run_python("-c", source, env=told({"PYTHONPATH": "/a"}))[0])
        assert FOLDER not in path
        assert "/a" in path
        assert handed_on == f"{FOLDER}:/a"

    def test_the_sitecustomize_of_the_user_runs_as_in_plain_python(self, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; print('ran', __file__, sys.path.count(__file__))")
        source = "import sitecustomize; print(sitecustomize.__file__)"
        plain, with_ours = (
            run_python("-c", source, env=env)
            for env in ({"PYTHONPATH": str(tmp_path)}, told({"PYTHONPATH": str(tmp_path)}))
        )
        assert plain == with_ours
        assert plain[0].splitlines() == [f"ran {tmp_path}/sitecustomize.py 0", f"{tmp_path}/sitecustomize.py"]

    @pytest.mark.parametrize("source", ["raise ValueError('user')", "import there_is_no_such_module", "1 +"])
    def test_the_sitecustomize_of_the_user_fails_as_in_plain_python(self, tmp_path: Path, source: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(source)
        plain, with_ours = (
            run_python("-c", "print('went on')", env=env)
            for env in ({"PYTHONPATH": str(tmp_path)}, told({"PYTHONPATH": str(tmp_path)}))
        )
        assert with_ours == plain
        assert plain[0] == "went on\n"
        assert "Error in sitecustomize" in plain[1]

    @pytest.mark.parametrize("flags", [["-S"], ["-I"], ["-E"]])
    def test_an_isolated_child_python_does_not_import_the_hook(self, flags: list[str]) -> None:
        source = "import sys; print('distlaunch_children' in sys.modules)"
        assert run_python(*flags, "-c", source, env=told()) == ("False\n", "")

    @pytest.mark.parametrize("value", ["", "no", "no order", "1 no JSON", '1 {"new": 1}', '1 {"status_file": 3}'])
    def test_the_hook_silently_ignores_an_invalid_order(self, value: str) -> None:
        source = "from worker_entry import progress; progress.report(step=1); print('went on')"
        assert run_python("-c", source, env={**told(), VARIABLE: value}, cwd=ROOT) == ("went on\n", "")

    def test_the_sitecustomize_hook_uses_no_syntax_that_python_2_lacks(self) -> None:
        """The file uses no syntax that Python 2 lacks."""
        source = (Path(FOLDER) / "sitecustomize.py").read_text()
        later = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.FunctionDef, ast.AsyncFunctionDef, ast.Nonlocal)
        tree = ast.parse(source)
        assert not [node for node in ast.walk(tree) if isinstance(node, later)]
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.cause is not None]
        assert source.isascii()

    def test_child_processes_import_worker_entry_from_the_package_of_the_hook(self, tmp_path: Path) -> None:
        shutil.copytree(Path(FOLDER).parent, tmp_path / "worker_entry")
        env = {**told(), "PYTHONPATH": str(tmp_path / "worker_entry" / "children")}
        found, _ = run_python("-c", "import worker_entry; print(worker_entry.__file__)", env=env)
        assert found == f"{tmp_path}/worker_entry/__init__.py\n"


COUNTING = """
import multiprocessing, os, signal, subprocess, sys
from worker_entry import progress
from worker_entry.task import meter

def tell(step):
    progress.report(step=step)
    meter._meter.report()

if __name__ == "__main__":
    if "wrapper" in sys.argv:
        # Two train at the same time, and the first is counted; after the first has ended, the next is counted.
        first = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first.stdout.readline()
        subprocess.run([sys.executable, __file__], input="", text=True, check=True)
        first.communicate()
        if "again" in sys.argv:
            subprocess.run([sys.executable, __file__, "again"], input="", text=True, check=True)
    else:
        last = 70 if "again" in sys.argv else 7
        tell(last - 1)
        print("began", flush=True)
        sys.stdin.read()
        child = multiprocessing.get_context("spawn").Process(target=tell, args=(99,))
        child.start()
        child.join()
        tell(last)
        os.kill(os.getpid(), signal.SIGURG)
"""


class TestSteps:
    """A program without TensorFlow that reports its own steps."""

    @pytest.mark.parametrize(
        ("program", "step"),
        [
            (["--", sys.executable, "count.py"], 7),
            pytest.param(["count.py"], 7, marks=pytest.mark.slow),
            pytest.param(["--", sys.executable, "count.py", "wrapper"], 7, marks=pytest.mark.slow),
            pytest.param(["count.py", "wrapper"], 7, marks=pytest.mark.slow),
            (["--", "./run.sh", "wrapper", "again"], 70),
        ],
        ids=["command", "script", "command's child", "script's child", "second grandchild of a shell"],
    )
    def test_progress_comes_from_the_descendant_process_that_trains(
        self, distlaunch: Distlaunch, tmp_path: Path, program: list[str], step: int
    ) -> None:
        """Its `multiprocessing` children and another process that trains at the same time do not report."""
        (tmp_path / "count.py").write_text(COUNTING)
        (tmp_path / "run.sh").write_text(f'#!/bin/sh\n{sys.executable} count.py "$@"\n')
        (tmp_path / "run.sh").chmod(0o755)
        ran = distlaunch("local", "-n", "1", *program)
        assert ran.status == 0, ran.stderr
        assert ran.report["attempts"][0]["tasks"][0]["progress"]["step"] == step
        stacks = (ran.directory / "attempt-1" / "worker-0.stacks").read_text()
        assert "count.py" in stacks

    def test_a_killed_child_process_no_longer_counts_as_training(self, tmp_path: Path) -> None:
        files = AttemptFiles(str(tmp_path), 1)
        (tmp_path / "attempt-1").mkdir()
        (tmp_path / "count.py").write_text(COUNTING)
        env = {**os.environ, **told(child_file=files.child("worker:0"))}
        status = StatusFiles(files, "worker:0")
        command = [sys.executable, str(tmp_path / "count.py")]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            news = status.read_changed()
            assert news is not None
            assert news.progress is not None
            assert (news.progress.step, news.progress.training) == (6, True)
            assert status.read_changed() is None
            process.kill()
        news = status.read_changed()
        assert news is not None
        assert news.progress is not None
        assert (news.progress.step, news.progress.training) == (6, False)

    def test_steps_of_child_processes_are_not_counted_with_progress_false(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "count.py").write_text("from worker_entry import progress; progress.report(step=1)")
        ran = distlaunch("local", "-n", "1", "--set", "progress=false", "--", sys.executable, "count.py")
        assert ran.status == 0, ran.stderr
        assert ran.report["attempts"][0]["tasks"][0]["progress"] is None


class TestCrash:
    def test_the_exception_that_ends_a_python_command_is_reported_as_the_cause(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "fail.py").write_text(
            "import os\nif os.fork() == 0:\n    raise KeyError('child')\nos.wait()\n1 / 0\n"
        )
        ran = distlaunch("local", "-n", "1", "--", sys.executable, "fail.py")
        assert ran.status == 1
        assert f"ZeroDivisionError: division by zero   {tmp_path}/fail.py:5" in ran.stderr

    @pytest.mark.slow
    def test_a_failure_of_the_program_is_not_blamed_on_its_child_process(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "child.py").write_text("from worker_entry import progress\nprogress.report(step=1)\n1 / 0\n")
        start = "subprocess.run([sys.executable, 'child.py'], check='check' in sys.argv)"
        (tmp_path / "fail.py").write_text(f"import subprocess, sys\n{start}\n{{}}['own']\n")
        for argument, cause in (("", f"KeyError: 'own'   {tmp_path}/fail.py:3"), ("check", f"{tmp_path}/child.py:3")):
            ran = distlaunch("local", "-n", "1", "--run-dir", str(tmp_path / f"run-{argument}"), "fail.py", argument)
            assert ran.status == 1
            assert cause in ran.stderr
