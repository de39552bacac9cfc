"""Defaults of options: variables, the file, their order, and the command that shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.processes.configs import SPEC, make_folder, write
from tests.harness.processes.in_process import run_here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def planned(folder: Path, *words: str, **env: str) -> str:
    ran = run_here("up", "--dry-run", *words, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


class TestOrder:
    """The command line, a variable, the spec, the file."""

    def test_the_spec_comes_before_the_file_and_after_a_variable(self, folder: Path) -> None:
        write(folder, "up: {set: [python=/file, working_directory=/work], env: [A=file, B=file]}\n")
        (folder / "spec.yaml").write_text(f"{SPEC}python: /spec\n")
        plan = planned(folder, "spec.yaml")
        assert "cd /work && " in plan
        assert " /spec " in plan
        assert (" A=spec " in plan, " B=file " in plan) == (True, True)
        plan = planned(folder, "spec.yaml", DISTLAUNCH_UP_PYTHON="/variable", DISTLAUNCH_UP_ENV="A=variable 'B=b c'")
        assert " /variable " in plan
        assert (" A=variable " in plan, " B='b c' " in plan) == (True, True)

    def test_the_command_line_comes_before_a_variable_of_another_option(self, folder: Path) -> None:
        plan = planned(folder, "spec.yaml", "--set", "python=/line", DISTLAUNCH_UP_PYTHON="/variable")
        assert " /line " in plan

    def test_a_spec_on_the_command_line_comes_before_hosts_of_a_variable(self, folder: Path) -> None:
        env = {"DISTLAUNCH_UP_HOSTS": "gpu-a,gpu-b"}
        assert "worker:1 on gpu-b\n" in planned(folder, "train.py", **env)
        assert "worker:1 on gpu-d\n" in planned(folder, "spec.yaml", "--set", "name=x", **env)
        write(folder, "up: {hosts: [gpu-c]}\n")
        assert "worker:0 on gpu-c\n" in planned(folder, "-v", "train.py")
        assert "worker:0 on gpu-d\n" in planned(folder, "-v", "spec.yaml")


class TestFolder:
    def test_is_that_of_relative_paths(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PWD", str(folder))
        (folder / "inner").mkdir()
        (folder / "spec.yaml").rename(folder / "inner" / "spec.yaml")
        ran = run_here("-C", "inner", "up", "--dry-run", "spec.yaml", cwd=folder)
        assert f"cd {folder}/inner && " in ran.stdout
        assert os.environ["PWD"] == f"{folder}/inner"
