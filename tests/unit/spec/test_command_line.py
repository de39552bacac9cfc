"""Command lines that extend or replace a spec: program arguments, hosts, `init`, `-e` and `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from launcher.spec.loading import load_spec, parse_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.writing import SUGGESTED, render_commented
from tests.harness.builders.specs import specs
from tests.harness.processes.command_lines import init, make_folder, programs
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.in_process import run_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


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
    def test_arguments_after_a_spec_are_appended_to_those_of_its_program(
        self, in_process: Distlaunch, folder: Path, words: list[str], more: list[str]
    ) -> None:
        assert programs(in_process, "spec.yaml", *words) == [["local", "show.py", "first", *more]]

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
    def test_an_unknown_option_before_the_double_dash_is_a_usage_error(
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
    def test_init_writes_the_python_option_into_the_spec(self, in_process: Distlaunch, folder: Path) -> None:
        assert run_here("init", "-H", "a,b", "--python", "/opt/b", "show.py", cwd=folder).returncode == 0
        assert load_spec(folder / "cluster.yaml").python == "/opt/b"


class TestCheck:
    def test_check_of_hosts_uses_the_given_python(self, folder: Path) -> None:
        done = run_here("check", "-H", "local", "--python", "/opt/none/bin/python", cwd=folder)
        assert done.returncode == 2
        assert "no Python interpreter at /opt/none/bin/python" in done.stderr

    def test_check_of_a_program_without_hosts_is_a_usage_error(self, folder: Path) -> None:
        said = [run_here(command, "show.py", cwd=folder).stderr for command in ("check", "up")]
        assert said[0] == said[1]
        assert said[0].startswith("Error: show.py is a program, but no machine is named [usage]\n")

    def test_check_with_spec_only_accepts_hosts(self, folder: Path) -> None:
        done = run_here("check", "--spec-only", "-H", "gpu-a:2,gpu-b", cwd=folder)
        assert done.stdout == "the command line: ok, 3 tasks on 2 nodes\n"


class TestHosts:
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
    def test_an_incomplete_or_contradictory_command_line_starts_nothing(
        self, in_process: Distlaunch, folder: Path, words: list[str], message: str
    ) -> None:
        ran = in_process("up", *words)
        assert ran.status == 2
        assert f"Error: {message}" in ran.stderr
        assert not ran.directory.exists()


class TestVariablesAndSettings:
    @pytest.mark.parametrize("verb", ["up", "local"])
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--set", "restart.max_restart=3"], "--set restart.max_restart: unknown field; did you mean `max_rest"),
            (["--set", "env_from=[NOWHERE]"], "env_from: NOWHERE is not set in this environment"),
            (["-e", "1=x"], "-e '1': expected NAME or NAME=VALUE"),
        ],
    )
    def test_an_invalid_set_or_env_option_starts_nothing(
        self, in_process: Distlaunch, folder: Path, verb: str, words: list[str], message: str
    ) -> None:
        ran = in_process(verb, *words, "spec.yaml")
        assert ran.status == 2
        assert ran.stderr.startswith(f"Error: {message}")
        assert not ran.directory.exists()


class TestInit:
    def test_init_without_arguments_writes_two_local_workers(self, in_process: Distlaunch) -> None:
        spec = init(in_process)
        assert spec == ClusterSpec.model_validate({"nodes": [{"host": "local", "tasks": {"worker": 2}}]})

    def test_init_prints_the_spec_if_the_output_is_a_dash(self, in_process: Distlaunch, tmp_path: Path) -> None:
        ran = in_process("init", "-o", "-", "-H", "gpu-a", "--", "./run", run_dir=False)
        assert (ran.status, ran.stderr, [*tmp_path.iterdir()]) == (0, "", [])
        spec = parse_spec(ran.stdout.encode())
        assert (spec.nodes[0].host, spec.program.command) == ("gpu-a", ["./run"])

    def test_init_overwrites_a_file_only_with_force(self, in_process: Distlaunch, tmp_path: Path) -> None:
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
    def test_init_with_an_invalid_argument_writes_nothing(
        self, in_process: Distlaunch, tmp_path: Path, words: list[str], message: str
    ) -> None:
        ran = in_process("init", *words, run_dir=False)
        assert ran.status == 2
        assert ran.stderr.startswith(f"Error: {message}")
        assert [*tmp_path.iterdir()] == []

    @given(specs())
    def test_every_spec_written_by_init_is_read_back_unchanged(self, spec: ClusterSpec) -> None:
        again = parse_spec(render_commented(spec).encode())
        assert again == spec
        assert again.model_dump(exclude_unset=True, exclude_none=True) == spec.model_dump(
            exclude_unset=True, exclude_none=True
        )

    @pytest.mark.parametrize("field", SUGGESTED)
    def test_every_commented_field_in_an_init_spec_can_be_enabled(self, field: str) -> None:
        text = render_commented(ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}]}))
        assert f"\n# {field}: " in text
        spec = parse_spec(text.replace(f"\n# {field}: ", f"\n{field}: ").encode())
        assert field in spec.model_fields_set

    def test_every_field_in_an_init_spec_has_a_comment_above(self) -> None:
        fields = {"nodes": [{"host": "gpu-a"}], "keras": {"patch": False}, "ssh": {"user": "me"}, "progress": False}
        text = render_commented(ClusterSpec.model_validate(fields))
        for field in fields:
            above = text[: text.index(f"\n{field}:")].splitlines()[-1]
            assert above.startswith("# "), field


class TestCompose:
    def test_compose_writes_a_file_and_overwrites_it_only_with_force(self, folder: Path) -> None:
        printed = run_here("compose", "spec.yaml", cwd=folder)
        done = run_here("compose", "spec.yaml", "-o", "compose.yaml", cwd=folder)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "Wrote compose.yaml; `docker compose run --rm controller` runs it\n"
        assert (folder / "compose.yaml").read_text() == printed.stdout
        again = run_here("compose", "spec.yaml", "-o", "compose.yaml", cwd=folder)
        assert again.returncode == 2
        assert again.stderr.startswith("Error: compose.yaml exists [usage]\n")
        assert run_here("compose", "spec.yaml", "-o", "compose.yaml", "--force", cwd=folder).returncode == 0
