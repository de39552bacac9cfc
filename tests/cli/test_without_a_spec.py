"""Shorter ways to a cluster than a spec: arguments after it, hosts instead of it, `init`, `-e` and `--set`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.processes.command_lines import init, make_folder, programs
from tests.harness.processes.commands import Distlaunch, distlaunch_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


class TestArgumentsAfterASpec:
    def test_arguments_after_a_spec_are_appended_to_its_command(self, distlaunch: Distlaunch, folder: Path) -> None:
        (folder / "spec.yaml").write_text("nodes: [{host: local}]\nprogram: {command: [echo, a]}\n")
        ran = distlaunch("up", "spec.yaml", "b")
        assert (ran.status, ran.log()) == (0, b"a b\n")


class TestPythonOption:
    @pytest.mark.parametrize("hosts", ["gpu-a,gpu-b", "gpu-a:2"])
    def test_the_python_option_applies_to_all_hosts(self, in_process: Distlaunch, hosts: str) -> None:
        ran = in_process("up", "--dry-run", "-H", hosts, "--python", "~/v/bin/python", "show.py")
        assert ran.status == 0, ran.stderr
        assert ran.stdout.count(" ~/v/bin/python ") == 2

    def test_the_python_option_overrides_the_cluster_python_but_not_a_node_python(
        self, in_process: Distlaunch, folder: Path
    ) -> None:
        nodes = "nodes: [{host: a, python: /opt/a}, {host: b}]\npython: /opt/c\n"
        (folder / "spec.yaml").write_text(f"{nodes}program: {{script: show.py}}\n")
        ran = in_process("up", "--dry-run", "spec.yaml", "--python", "/opt/b")
        assert [ran.stdout.count(f" {python} ") for python in ("/opt/a", "/opt/b", "/opt/c")] == [1, 1, 0]


class TestCheckOfHosts:
    def test_check_accepts_hosts_and_a_program_like_up(self, folder: Path) -> None:
        command = distlaunch_command("check", "--json", "-H", "local", "show.py")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
        report = json.loads(done.stdout)
        assert [node["node"] for node in report["nodes"]] == ["local"]
        assert report["ok"]


class TestHosts:
    def test_each_slot_of_a_host_runs_one_worker(self, in_process: Distlaunch) -> None:
        words = ["-H", "gpu-a:2", "-H", "alice@gpu-b", "train.py", "--epochs", "3", "-H", "x", "--", "y"]
        program = ["train.py", "--epochs", "3", "-H", "x", "--", "y"]
        assert programs(in_process, *words) == [[host, *program] for host in ("gpu-a", "gpu-a", "alice@gpu-b")]

    @pytest.mark.parametrize(
        ("words", "program"),
        [
            (["-m", "my.module", "x"], ["-m", "my.module", "x"]),
            (["--", "./run", "-m"], ["--", "./run", "-m"]),
            (["train.py"], ["train.py"]),
        ],
    )
    def test_a_hostfile_works_with_modules_commands_and_scripts(
        self, in_process: Distlaunch, folder: Path, words: list[str], program: list[str]
    ) -> None:
        (folder / "hosts").write_text("gpu-a slots=1\n")
        assert programs(in_process, "--hostfile", "hosts", *words) == [["gpu-a", *program]]

    def test_up_with_hosts_passes_arguments_and_variables_to_the_program(
        self, distlaunch: Distlaunch, folder: Path
    ) -> None:
        ran = distlaunch("up", "-Hlocal:2", "--no-check", "-e", "A=1", "show.py", "x")
        assert ran.status == 0, ran.stderr
        for task in ("worker-0", "worker-1"):
            assert json.loads(ran.line("SHOWN (.*)", task)[1]) == [["x"], "1", None]


class TestVariablesAndSettings:
    @pytest.mark.parametrize("words", [["up", "spec.yaml"], ["local", "--workers", "1"]], ids=["up", "local"])
    def test_env_and_set_options_reach_the_program(
        self, distlaunch: Distlaunch, folder: Path, words: list[str]
    ) -> None:
        program = ["show.py"] if words[0] == "local" else []
        settings = ["--set", "program.args=[second, '']", "--set", "preload=false"]
        ran = distlaunch(*words, *settings, "-e", "A", "-e", "B=two words", *program, env={"A": "here"})
        assert ran.status == 0, ran.stderr
        assert json.loads(ran.line("SHOWN (.*)")[1]) == [["second", ""], "here", "two words"]

    @pytest.mark.parametrize("verb", ["up", "local"])
    def test_the_env_option_unsets_a_variable_that_is_not_set_here(
        self, distlaunch: Distlaunch, folder: Path, verb: str
    ) -> None:
        (folder / "spec.yaml").write_text(
            "nodes: [{host: local}]\nprogram: {script: show.py}\nenv: {A: x}\nenv_from: [B]\n"
        )
        assert "A" not in os.environ
        assert "B" not in os.environ
        words = ["spec.yaml"] if verb == "up" else ["--workers", "1", "--set", "preload=false", "show.py"]
        ran = distlaunch(verb, "-e", "A", "-e", "B", *words)
        assert ran.status == 0, ran.stderr
        assert json.loads(ran.line("SHOWN (.*)")[1]) == [[], None, None]

    def test_a_value_taken_from_the_environment_is_in_no_run_file(self, distlaunch: Distlaunch, folder: Path) -> None:
        ran = distlaunch("up", "-e", "COLOUR", "spec.yaml", "--set", "preload=false", env={"COLOUR": "aubergine"})
        assert ran.status == 0, ran.stderr
        files = [path for path in ran.directory.rglob("*") if path.is_file()]
        assert [path for path in files if b"aubergine" in path.read_bytes()] == []
        assert b"COLOUR" in (ran.directory / "spec.json").read_bytes()


class TestInit:
    def test_init_writes_the_spec_that_up_would_run(self, in_process: Distlaunch) -> None:
        words = ["-H", "gpu-a:2,ssh://gpu-b:2222", "--set", "restart.max_restarts=3", "train.py", "--lr", "1e-3", "no"]
        spec = init(in_process, *words)
        assert (len(spec.nodes), spec.nodes[1].ssh.port, spec.restart.max_restarts) == (2, 2222, 3)
        assert spec.program.args == ["--lr", "1e-3", "no"]
        assert programs(in_process, "cluster.yaml") == programs(in_process, *words)
