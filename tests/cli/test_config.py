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


class TestPrecedence:
    """The command line overrides a variable, which overrides the spec, which overrides the file."""

    def test_a_variable_overrides_the_spec_and_the_spec_overrides_the_config_file(self, folder: Path) -> None:
        write(folder, "up: {set: [python=/file, working_directory=/work], env: [A=file, B=file]}\n")
        (folder / "spec.yaml").write_text(f"{SPEC}python: /spec\n")
        plan = planned(folder, "spec.yaml")
        assert "cd /work && " in plan
        assert " /spec " in plan
        assert (" A=spec " in plan, " B=file " in plan) == (True, True)
        plan = planned(folder, "spec.yaml", DISTLAUNCH_UP_PYTHON="/variable", DISTLAUNCH_UP_ENV="A=variable 'B=b c'")
        assert " /variable " in plan
        assert (" A=variable " in plan, " B='b c' " in plan) == (True, True)

    def test_set_on_the_command_line_overrides_a_variable_of_another_option(self, folder: Path) -> None:
        plan = planned(folder, "spec.yaml", "--set", "python=/line", DISTLAUNCH_UP_PYTHON="/variable")
        assert " /line " in plan

    def test_a_spec_on_the_command_line_overrides_configured_hosts(self, folder: Path) -> None:
        env = {"DISTLAUNCH_UP_HOSTS": "gpu-a,gpu-b"}
        assert "worker:1 on gpu-b\n" in planned(folder, "train.py", **env)
        assert "worker:1 on gpu-d\n" in planned(folder, "spec.yaml", "--set", "name=x", **env)
        write(folder, "up: {hosts: [gpu-c]}\n")
        assert "worker:0 on gpu-c\n" in planned(folder, "-v", "train.py")
        assert "worker:0 on gpu-d\n" in planned(folder, "-v", "spec.yaml")


class TestDirectoryOption:
    def test_option_c_sets_the_folder_of_relative_paths_and_pwd(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PWD", str(folder))
        (folder / "inner").mkdir()
        (folder / "spec.yaml").rename(folder / "inner" / "spec.yaml")
        ran = run_here("-C", "inner", "up", "--dry-run", "spec.yaml", cwd=folder)
        assert f"cd {folder}/inner && " in ran.stdout
        assert os.environ["PWD"] == f"{folder}/inner"
