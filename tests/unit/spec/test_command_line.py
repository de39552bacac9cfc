"""Shorter ways to a cluster than a spec: arguments after it, hosts instead of it, `init`, `-e` and `--set`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given

from launcher.spec.loading import load_spec, parse_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.writing import SUGGESTED, render_commented
from tests.harness.commands import Distlaunch, distlaunch_command
from tests.harness.generated_specs import specs
from tests.harness.in_process import run_here

SHOW = "import json, os, sys\nprint('SHOWN', json.dumps([sys.argv[1:], os.environ.get('A'), os.environ.get('B')]))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "spec.yaml").write_text("nodes: [{host: local}]\nprogram: {script: show.py, args: [first]}\n")
    return tmp_path


def programs(in_process: Distlaunch, *words: str) -> list[list[str]]:
    """What `up --dry-run` shows of each task: its node, and the words of its program."""
    ran = in_process("up", "--dry-run", *words)
    assert (ran.status, ran.stderr) == (0, "")
    nodes = [line.split()[2] for line in ran.stdout.splitlines() if line.startswith("worker:")]
    commands = [shlex.split(line) for line in ran.stdout.splitlines() if line.startswith("  by hand ")]
    ends = [command[command.index("run") + 1 :] for command in commands]
    return [[node, *end] for node, end in zip(nodes, ends, strict=True)]


class TestArgumentsAfterASpec:
    @pytest.mark.parametrize(
        ("words", "more"),
        [
            ([], []),
            (["--", "--epochs", "3"], ["--epochs", "3"]),
            (["x", "-v", "y"], ["x", "y"]),
            (["--no-check", "-v", "--set", "timeouts.lease_s=9", "--", "--epochs", "--lease"], ["--epochs", "--lease"]),
            (["--", "--verbose", "--", "x"], ["--verbose", "--", "x"]),
            (["-e", "A=1", "--", "-vx"], ["-vx"]),
            (["--keep-warm=9s", "-", "--", ""], ["-", ""]),
            (["-e", "H", "-ve", "A=1", "x", "--", "-e"], ["x", "-e"]),
            (["x", "--set", "timeouts.lease_s=9", "y", "--no-check"], ["x", "y"]),
        ],
    )
    def test_follow_those_of_its_program(
        self, in_process: Distlaunch, folder: Path, words: list[str], more: list[str]
    ) -> None:
        assert programs(in_process, "spec.yaml", *words) == [["local", "show.py", "first", *more]]

    def test_follow_the_words_of_a_command(self, distlaunch: Distlaunch, folder: Path) -> None:
        (folder / "spec.yaml").write_text("nodes: [{host: local}]\nprogram: {command: [echo, a]}\n")
        ran = distlaunch("up", "spec.yaml", "b")
        assert (ran.status, ran.log()) == (0, b"a b\n")

    @pytest.mark.parametrize(
        ("words", "meant"),
        [
            (["--max-restart", "3"], "--max-restarts"),
            (["--run-dirs", "3"], "--run-dir"),
            (["-v", "x", "--no-checks"], "--no-check"),
            (["--epochs", "3"], ""),
            (["-n", "2", "--dry-run"], ""),
            (["-vx"], ""),
            (["-1"], ""),
        ],
    )
    @pytest.mark.parametrize("command", [["up"], ["submit"], ["export", "kubernetes"]], ids=" ".join)
    def test_a_word_with_a_dash_before_the_dashes_is_an_option_or_an_error(
        self, folder: Path, command: list[str], words: list[str], meant: str
    ) -> None:
        given = [word for word in words if command == ["up"] or word != "-v"]
        ran = run_here(*command, "spec.yaml", *given, cwd=folder)
        assert ran.returncode == 2
        assert f"Error: `distlaunch {' '.join(command)}` has no option -" in ran.stderr
        assert "rite -- before arguments of the program\n" in ran.stderr
        assert not meant or command != ["up"] or f"did you mean {meant}? " in ran.stderr
        assert sorted(path.name for path in folder.iterdir()) == ["show.py", "spec.yaml"]


class TestPython:
    @pytest.mark.parametrize("hosts", ["gpu-a,gpu-b", "gpu-a:2"])
    def test_is_that_of_all_hosts(self, in_process: Distlaunch, hosts: str) -> None:
        ran = in_process("up", "--dry-run", "-H", hosts, "--python", "~/v/bin/python", "show.py")
        assert ran.status == 0, ran.stderr
        assert ran.stdout.count(" ~/v/bin/python ") == 2

    def test_is_that_of_nodes_whose_spec_names_none(self, in_process: Distlaunch, folder: Path) -> None:
        nodes = "nodes: [{host: a, python: /opt/a}, {host: b}]\npython: /opt/c\n"
        (folder / "spec.yaml").write_text(f"{nodes}program: {{script: show.py}}\n")
        ran = in_process("up", "--dry-run", "spec.yaml", "--python", "/opt/b")
        assert [ran.stdout.count(f" {python} ") for python in ("/opt/a", "/opt/b", "/opt/c")] == [1, 1, 0]

    def test_goes_into_a_spec_that_init_writes(self, in_process: Distlaunch, folder: Path) -> None:
        assert run_here("init", "-H", "a,b", "--python", "/opt/b", "show.py", cwd=folder).returncode == 0
        assert load_spec(folder / "cluster.yaml").python == "/opt/b"


class TestCheckOfHosts:
    def test_checks_what_up_would_run(self, folder: Path) -> None:
        command = distlaunch_command("check", "--json", "-H", "local", "show.py")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
        report = json.loads(done.stdout)
        assert [node["node"] for node in report["nodes"]] == ["local"]
        assert report["good"]

    def test_uses_the_python_that_it_is_given(self, folder: Path) -> None:
        done = run_here("check", "-H", "local", "--python", "/opt/none/bin/python", cwd=folder)
        assert done.returncode == 2
        assert "no Python interpreter at /opt/none/bin/python" in done.stderr

    def test_of_a_program_says_that_no_machine_is_named(self, folder: Path) -> None:
        said = [run_here(command, "show.py", cwd=folder).stderr for command in ("check", "up")]
        assert said[0] == said[1]
        assert said[0].startswith("Error: show.py is a program, but no machine is named [usage]\n")

    def test_of_only_the_spec_takes_hosts_as_well(self, folder: Path) -> None:
        done = run_here("check", "--spec-only", "-H", "gpu-a:2,gpu-b", cwd=folder)
        assert done.stdout == "the command line: good, 3 tasks on 2 nodes\n"


class TestHosts:
    def test_each_slot_is_a_worker_of_the_program(self, in_process: Distlaunch) -> None:
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
    def test_a_host_file_goes_with_every_kind_of_program(
        self, in_process: Distlaunch, folder: Path, words: list[str], program: list[str]
    ) -> None:
        (folder / "hosts").write_text("gpu-a slots=1\n")
        assert programs(in_process, "--hostfile", "hosts", *words) == [["gpu-a", *program]]

    def test_the_program_runs_there(self, distlaunch: Distlaunch, folder: Path) -> None:
        ran = distlaunch("up", "-Hlocal:2", "--no-check", "-e", "A=1", "show.py", "x")
        assert ran.status == 0, ran.stderr
        for task in ("worker-0", "worker-1"):
            assert json.loads(ran.line("SHOWN (.*)", task)[1]) == [["x"], "1", None]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--hostfile", "missing", "show.py"], "cannot read the host file missing: No such file or directory"),
            (["--hostfile", "/dev/null", "show.py"], "the host file /dev/null names no host"),
            (["-H", "", "show.py"], "-H: expected a host, or `HOST:SLOTS` like `gpu-a:2`, got ''"),
            (["-H", "local,gpu-a", "show.py"], "-H: nodes[0].host: other machines cannot dial `local`; add the "),
            (["-H", "gpu-a", "spec.yaml"], "spec.yaml is a spec, which names its own machines"),
            (["spec.yaml", "-H", "gpu-a"], "-H, --hostfile and --slurm go before the program"),
            (["show.py"], "show.py is a program, but no machine is named"),
            (["-m", "my.module"], "-m my.module is a program, but no machine is named"),
            (["-m"], "-m is a program, but no machine is named"),
            ([], "no spec is named"),
            (["-H", "gpu-a", "--"], "-- needs the name of a program after it"),
            (["--bogus", "spec.yaml"], "`distlaunch up` has no option --bogus"),
        ],
    )
    def test_a_command_line_without_a_machine_or_a_program_starts_nothing(
        self, in_process: Distlaunch, folder: Path, words: list[str], message: str
    ) -> None:
        ran = in_process("up", *words)
        assert ran.status == 2
        assert f"Error: {message}" in ran.stderr
        assert not ran.directory.exists()


class TestVariablesAndSettings:
    @pytest.mark.parametrize("words", [["up", "spec.yaml"], ["local", "--workers", "1"]], ids=["up", "local"])
    def test_reach_the_program(self, distlaunch: Distlaunch, folder: Path, words: list[str]) -> None:
        program = ["show.py"] if words[0] == "local" else []
        settings = ["--set", "program.args=[second, '']", "--set", "preload=false"]
        ran = distlaunch(*words, *settings, "-e", "A", "-e", "B=two words", *program, env={"A": "here"})
        assert ran.status == 0, ran.stderr
        assert json.loads(ran.line("SHOWN (.*)")[1]) == [["second", ""], "here", "two words"]

    @pytest.mark.parametrize("verb", ["up", "local"])
    def test_a_name_that_is_not_set_here_is_not_passed(self, distlaunch: Distlaunch, folder: Path, verb: str) -> None:
        (folder / "spec.yaml").write_text(
            "nodes: [{host: local}]\nprogram: {script: show.py}\nenv: {A: x}\nenv_from: [B]\n"
        )
        assert "A" not in os.environ
        assert "B" not in os.environ
        words = ["spec.yaml"] if verb == "up" else ["--workers", "1", "--set", "preload=false", "show.py"]
        ran = distlaunch(verb, "-e", "A", "-e", "B", *words)
        assert ran.status == 0, ran.stderr
        assert json.loads(ran.line("SHOWN (.*)")[1]) == [[], None, None]

    def test_a_value_taken_from_here_is_in_no_file_of_the_run(self, distlaunch: Distlaunch, folder: Path) -> None:
        ran = distlaunch("up", "-e", "COLOUR", "spec.yaml", "--set", "preload=false", env={"COLOUR": "aubergine"})
        assert ran.status == 0, ran.stderr
        files = [path for path in ran.directory.rglob("*") if path.is_file()]
        assert [path for path in files if b"aubergine" in path.read_bytes()] == []
        assert b"COLOUR" in (ran.directory / "spec.json").read_bytes()

    @pytest.mark.parametrize("verb", ["up", "local"])
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--set", "restart.max_restart=3"], "--set restart.max_restart: unknown field; did you mean `max_rest"),
            (["--set", "env_from=[NOWHERE]"], "env_from: NOWHERE is not set in this environment"),
            (["-e", "1=x"], "-e '1': expected NAME or NAME=VALUE"),
        ],
    )
    def test_a_mistake_starts_nothing(
        self, in_process: Distlaunch, folder: Path, verb: str, words: list[str], message: str
    ) -> None:
        ran = in_process(verb, *words, "spec.yaml")
        assert ran.status == 2
        assert ran.stderr.startswith(f"Error: {message}")
        assert not ran.directory.exists()


class TestInit:
    def init(self, in_process: Distlaunch, *words: str) -> ClusterSpec:
        ran = in_process("init", *words, run_dir=False)
        assert (ran.status, ran.stdout) == (0, "")
        assert ran.stderr == "Wrote cluster.yaml; `distlaunch check cluster.yaml` checks it\n"
        return load_spec(ran.directory.parent / "cluster.yaml")

    def test_alone_it_writes_two_workers_on_this_machine(self, in_process: Distlaunch) -> None:
        spec = self.init(in_process)
        assert spec == ClusterSpec.model_validate({"nodes": [{"host": "local", "tasks": {"worker": 2}}]})

    def test_the_spec_that_it_writes_is_the_one_that_up_runs(self, in_process: Distlaunch) -> None:
        words = ["-H", "gpu-a:2,ssh://gpu-b:2222", "--set", "restart.max_restarts=3", "train.py", "--lr", "1e-3", "no"]
        spec = self.init(in_process, *words)
        assert (len(spec.nodes), spec.nodes[1].ssh.port, spec.restart.max_restarts) == (2, 2222, 3)
        assert spec.program.args == ["--lr", "1e-3", "no"]
        assert programs(in_process, "cluster.yaml") == programs(in_process, *words)

    def test_a_dash_prints_it(self, in_process: Distlaunch, tmp_path: Path) -> None:
        ran = in_process("init", "-o", "-", "-H", "gpu-a", "--", "./run", run_dir=False)
        assert (ran.status, ran.stderr, [*tmp_path.iterdir()]) == (0, "", [])
        spec = parse_spec(ran.stdout.encode())
        assert (spec.nodes[0].host, spec.program.command) == ("gpu-a", ["./run"])

    def test_a_file_is_overwritten_only_by_force(self, in_process: Distlaunch, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("mine")
        refused = in_process("init", "-o", "mine.yaml", run_dir=False)
        assert (refused.status, path.read_text()) == (2, "mine")
        assert refused.stderr == (
            "Error: mine.yaml exists [usage]\n  overwrite it with --force, or name another with -o\n"
        )
        assert in_process("init", "--force", "-o", "mine.yaml", run_dir=False).status == 0
        assert load_spec(path).is_local

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-o", "no/such.yaml"], "cannot write no/such.yaml: No such file or directory"),
            (["--hostfile", "missing"], "cannot read the host file missing: No such file or directory"),
            (["spec.yaml"], "spec.yaml is a spec, which names its own machines"),
            (["--set", "nam=x"], "--set nam: unknown field; did you mean `name`?"),
        ],
    )
    def test_a_mistake_writes_nothing(
        self, in_process: Distlaunch, tmp_path: Path, words: list[str], message: str
    ) -> None:
        ran = in_process("init", *words, run_dir=False)
        assert ran.status == 2
        assert ran.stderr.startswith(f"Error: {message}")
        assert [*tmp_path.iterdir()] == []

    @given(specs())
    def test_every_spec_that_is_written_is_read_back_as_the_same(self, spec: ClusterSpec) -> None:
        again = parse_spec(render_commented(spec).encode())
        assert again == spec
        assert again.model_dump(exclude_unset=True, exclude_none=True) == spec.model_dump(
            exclude_unset=True, exclude_none=True
        )

    @pytest.mark.parametrize("field", SUGGESTED)
    def test_every_comment_of_a_field_can_be_turned_into_the_field(self, field: str) -> None:
        text = render_commented(ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}]}))
        assert f"\n# {field}: " in text
        spec = parse_spec(text.replace(f"\n# {field}: ", f"\n{field}: ").encode())
        assert field in spec.model_fields_set

    def test_every_field_that_is_written_has_its_meaning_above_it(self) -> None:
        fields = {"nodes": [{"host": "gpu-a"}], "keras": {"patch": False}, "ssh": {"user": "me"}, "progress": False}
        text = render_commented(ClusterSpec.model_validate(fields))
        for field in fields:
            above = text[: text.index(f"\n{field}:")].splitlines()[-1]
            assert above.startswith("# "), field


class TestCompose:
    def test_writes_a_file_and_overwrites_none_without_force(self, folder: Path) -> None:
        printed = run_here("compose", "spec.yaml", cwd=folder)
        done = run_here("compose", "spec.yaml", "-o", "compose.yaml", cwd=folder)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "Wrote compose.yaml; `docker compose run --rm controller` runs it\n"
        assert (folder / "compose.yaml").read_text() == printed.stdout
        again = run_here("compose", "spec.yaml", "-o", "compose.yaml", cwd=folder)
        assert again.returncode == 2
        assert again.stderr.startswith("Error: compose.yaml exists [usage]\n")
        assert run_here("compose", "spec.yaml", "-o", "compose.yaml", "--force", cwd=folder).returncode == 0
