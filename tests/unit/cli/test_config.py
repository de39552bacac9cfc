"""Defaults of options: variables, the file, their order, and the command that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from launcher.cli.defaults import find_variable, options_of, walk
from launcher.cli.main import cli
from tests.harness.processes.configs import make_folder, write
from tests.harness.processes.in_process import run_here
from worker_entry.protocol import environment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def written(folder: Path, *words: str, **env: str) -> str:
    """The spec that `init` writes, which is the one that `up` runs with the same options."""
    ran = run_here("init", "-o", "-", *words, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def refused(folder: Path, *words: str, **env: str) -> str:
    ran = run_here(*words, cwd=folder, env=env)
    assert (ran.returncode, ran.stdout) == (2, "")
    return ran.stderr


class TestPrecedence:
    """In this order: the command line, an environment variable, the spec, the file of defaults."""

    @pytest.mark.parametrize(
        ("words", "variable", "file", "used"),
        [
            (["--python", "/line"], "/variable", "/file", "/line"),
            ([], "/variable", "/file", "/variable"),
            ([], "", "/file", "/file"),
        ],
    )
    def test_the_command_line_overrides_variables_and_the_file_for_spec_fields(
        self, folder: Path, words: list[str], variable: str, file: str, used: str
    ) -> None:
        write(folder, f"python: {file}\n")
        env = {"DISTLAUNCH_INIT_PYTHON": variable}
        assert f"\npython: {used}\n" in written(folder, "-H", "a", *words, **env)

    def test_the_command_line_overrides_variables_and_the_file_for_other_options(self, folder: Path) -> None:
        write(folder, "local: {workers: 4}\n")
        for words, env, count in ((["-n", "1"], "2", 1), ([], "2", 2), ([], "", 4)):
            ran = run_here("local", "--dry-run", *words, "x.py", cwd=folder, env={"DISTLAUNCH_LOCAL_WORKERS": env})
            assert ran.stdout.count("\n  by hand ") == count

    def test_a_default_for_one_command_overrides_a_default_for_all_commands(self, folder: Path) -> None:
        write(folder, "init: {python: /mine}\npython: /all\n")
        assert "\npython: /mine\n" in written(folder, "-H", "a")

    @pytest.mark.parametrize("value", ["0", "false", "no"])
    def test_a_variable_with_0_false_or_no_leaves_a_flag_off(self, folder: Path, value: str) -> None:
        write(folder, "local: {dry-run: true, tensorboard: true}\n")
        env = {"DISTLAUNCH_CONFIG_JSON": value}
        assert run_here("config", cwd=folder, env=env).stdout.startswith("File: ")


class TestErrors:
    @pytest.mark.parametrize(
        ("env", "words", "message"),
        [
            ({"LOCAL_WORKERS": "x"}, "local", "LOCAL_WORKERS: expected a whole number of at least 1, not x"),
            ({"LOCAL_MAX_RESTARTS": "x"}, "local", "LOCAL_MAX_RESTARTS: expected a whole number, got 'x'"),
            ({"LOCAL_FRAMEWORK": "x"}, "local", "LOCAL_FRAMEWORK: expected tensorflow, torch or jax, not x"),
            ({"LOCAL_REPORT": "x"}, "local", "LOCAL_REPORT: expected true or false"),
            ({"UP_SET": "'a=b"}, "up spec.yaml", "UP_SET: expected words as in a shell, but a quote is not closed"),
            ({"UP_SET": "a=b"}, "up spec.yaml", "UP_SET a: unknown field"),
        ],
    )
    def test_the_error_for_an_invalid_variable_names_the_variable(
        self, folder: Path, env: dict[str, str], words: str, message: str
    ) -> None:
        given = {f"DISTLAUNCH_{name}": value for name, value in env.items()}
        assert refused(folder, *words.split(), **given).startswith(f"Error: DISTLAUNCH_{message}")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("local: {workers: x}", "1 workers: expected a whole number of at least 1, not x"),
            ("local:\n  max-restarts: x", "2 max-restarts: expected a whole number, got 'x'"),
            ("local: {set: [a=b]}", "1 set a: unknown field"),
        ],
    )
    def test_an_invalid_value_in_the_file_of_defaults_is_reported_with_its_line(
        self, folder: Path, text: str, message: str
    ) -> None:
        path = write(folder, text)
        assert refused(folder, "local").startswith(f"Error: {path}:{message}")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("pyton: x", "1:1 pyton: no command has an option pyton; did you mean python?"),
            ("up: {max_restarts: 3}", "1:6 up.max_restarts: `distlaunch up` has no option max_restarts; did you mean "),
            ("uq: {no-live: true}", "1:1 uq: distlaunch has no such command"),
            (
                "export: {kubernetes: {x: y}}",
                "1:23 export.kubernetes.x: `distlaunch export kubernetes` has no option x",
            ),
            ("no-live: maybe", "1:10 no-live: expected true or false"),
            ("python: [a]", "1:9 python: expected a single value"),
            ("up: {set: [[a]]}", "1:11 up.set: expected a text or a list of texts"),
            ("- a", "1:1: expected options and commands, like `up: {no-live: true}`"),
            ("a: [", "2:1"),
            ("version: true", "1:1 version: no command has an option version"),
        ],
    )
    def test_errors_in_the_file_of_defaults_are_reported_with_their_positions(
        self, folder: Path, text: str, message: str
    ) -> None:
        path = write(folder, f"{text}\n")
        error = refused(folder, "ls")
        assert error.startswith("Error: the file of defaults has an error; nothing was started [usage]\n")
        assert f"  {path}:{message}" in error

    def test_a_file_of_defaults_that_other_users_can_write_is_rejected(self, folder: Path) -> None:
        path = Path(write(folder, "python: /other\n"))
        path.chmod(0o666)
        assert f"other users can write the file of defaults {path}" in refused(folder, "ls")

    def test_distlaunch_config_selects_another_file_of_defaults(self, folder: Path) -> None:
        write(folder, "python: /file\n")
        (folder / "other.yaml").write_text("python: /other\n")
        (folder / "other.yaml").chmod(0o600)
        for file, used in (("other.yaml", "/other"), ("/dev/null", "")):
            spec = written(folder, "-H", "a", DISTLAUNCH_CONFIG=file)
            assert ("\npython: " in spec, f"\npython: {used}\n" in spec) == (bool(used), bool(used))
        assert "cannot read the file of defaults none.yaml: No such" in refused(
            folder, "ls", DISTLAUNCH_CONFIG="none.yaml"
        )

    def test_an_empty_file_of_defaults_is_valid(self, folder: Path) -> None:
        for text in ("", "# nothing\n"):
            write(folder, text)
            assert run_here("ls", cwd=folder).returncode == 0

    def test_completion_ignores_errors_in_the_file_of_defaults(self, folder: Path) -> None:
        write(folder, "pyton: x\n")
        env = {"_DISTLAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "distlaunch sta", "COMP_CWORD": "1"}
        with pytest.raises(SystemExit):
            run_here(cwd=folder, env=env)


class TestConfig:
    def test_the_config_command_shows_values_with_origins_and_redacts_secrets(self, folder: Path) -> None:
        path = write(folder, "python: /opt/python\nup:\n  env: [API=hidden]\n")
        ran = run_here("config", "--json", cwd=folder, env={"DISTLAUNCH_UP_MAX_RESTARTS": "3"})
        found = json.loads(ran.stdout)
        assert (ran.returncode, found["file"], found["unknown"]) == (0, path, [])
        values = {(each["command"], each["option"]): (each["value"], each["origin"]) for each in found["values"]}
        assert values.pop(("up", "max-restarts")) == ("3", "DISTLAUNCH_UP_MAX_RESTARTS")
        assert values.pop(("up", "env")) == ("'API=(redacted)'", f"{path}:3")
        assert set(values.values()) == {("/opt/python", f"{path}:1")}
        assert {command for command, _ in values} == {"local", "up", "check", "doctor", "test-resume", "init"}

    def test_the_config_command_lists_all_options_of_a_command_with_variables(self, folder: Path) -> None:
        lines = run_here("config", "up", cwd=folder).stdout.splitlines()
        assert lines[0].endswith("config.yaml (missing)")
        assert [line.split()[0] for line in lines[2:]] == [f"--{name}" for name in options_of(cli.commands["up"])]
        assert any(line.endswith("DISTLAUNCH_UP_RUN_DIR") for line in lines)

    def test_the_config_command_reports_variables_that_match_no_option(self, folder: Path) -> None:
        ran = run_here("config", cwd=folder, env={"DISTLAUNCH_UP_MAX_RESTART": "3"})
        assert ran.returncode == 2
        assert ran.stderr == (
            "DISTLAUNCH_UP_MAX_RESTART is the variable of no option; did you mean DISTLAUNCH_UP_MAX_RESTARTS?\n"
        )

    def test_the_config_command_rejects_an_unknown_command(self, folder: Path) -> None:
        assert refused(folder, "config", "upp") == (
            "Error: `distlaunch` has no command upp [usage]\n  did you mean up? `distlaunch -h` lists its commands\n"
        )


def test_no_task_variable_is_also_an_option_variable() -> None:
    """A run started within a task must not take the task's variables for options, not even for future options."""
    ours = {value for value in vars(environment).values() if isinstance(value, str) and value.startswith("DISTLAUNCH_")}
    assert len(ours) > 20
    variables = {find_variable(f"distlaunch {path}", name) for path, each in walk(cli) for name in options_of(each)}
    assert "DISTLAUNCH_EXPORT_KUBERNETES_IMAGE" in variables
    assert not variables & ours
    starts = tuple(f"DISTLAUNCH_{path.upper().replace(' ', '_')}_" for path, _ in walk(cli) if path)
    assert not [name for name in ours if name.startswith(starts)]


def test_every_command_option_has_an_environment_variable() -> None:
    for path, command in walk(cli):
        for option in command.params:
            if isinstance(option, click.Option) and option.opts != ["-C"]:
                names = {name.removeprefix("--") for name in option.opts}
                assert names & options_of(command).keys() or names & {"help", "version"}, (path, option.opts)


class TestFolder:
    def test_changing_to_a_missing_folder_is_an_error(self, folder: Path) -> None:
        assert refused(folder, "-C", "none", "ls").startswith("Error: -C: cannot change to none: No such file or ")
