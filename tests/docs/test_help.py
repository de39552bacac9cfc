"""The help of the command line is complete, divided into sections, and correct."""

from __future__ import annotations

import re
from importlib import metadata
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from launcher.cli.changes import FieldParameter
from launcher.cli.main import CONTEXT, cli
from launcher.cli.sections import OTHER, SectionedOption
from launcher.spec.field_options import MAX_RESTARTS, PYTHON
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.spec.parts import RestartSpec
from launcher.spec.settings import PATHS
from tests.harness.processes.in_process import run_here

COMMANDS = sorted(cli.commands)


def help_of(*words: str, width: int = 80) -> list[str]:
    ran = CliRunner().invoke(cli, [*words, "-h"], prog_name="distlaunch", terminal_width=width, obj={})
    assert ran.exit_code == 0
    return ran.output.splitlines()


def command_of(first: str, *inner: str) -> click.Command:
    """The command, or a command of a group."""
    command = cli.commands[first]
    for name in inner:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


def test_help_lists_commands_by_purpose() -> None:
    lines = help_of()
    listed: dict[str, list[str]] = {}
    for line in lines[lines.index("Run:") :]:
        if line.endswith(":"):
            title = line
        elif line:
            listed.setdefault(title, []).append(line.split()[0])
    assert listed == {
        "Run:": ["local", "up", "submit", "resume"],
        "Look:": ["check", "plan", "ls", "status", "logs", "attach", "report", "stacks", "profile", "collect"],
        "End:": ["wait", "down", "clean", "rm", "prune"],
        "Prepare:": ["doctor", "test-resume", "init", "compose", "export", "schema", "config", "completion"],
    }
    assert sorted(name for names in listed.values() for name in names) == COMMANDS


def test_the_summary_of_each_command_fits_on_one_line_of_help() -> None:
    lines = help_of()
    for name, command in cli.commands.items():
        [line] = [line for line in lines if line.startswith(f"  {name} ")]
        assert command.help is not None
        assert line.split(maxsplit=1)[1] == command.help.partition("\n")[0]
        assert line.endswith(".")


@pytest.mark.parametrize("name", ["", *COMMANDS, "export kubernetes"])
def test_no_help_line_exceeds_80_columns(name: str) -> None:
    assert max(map(len, help_of(*name.split()))) <= 80
    assert CONTEXT["max_content_width"] == 80


@pytest.mark.parametrize("name", [*COMMANDS, "export kubernetes"])
def test_help_shows_every_option_once_with_a_sentence(name: str) -> None:
    lines = help_of(*name.split())
    command = command_of(*name.split())
    context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    for option in options:
        longest = max(option.opts, key=len)
        assert sum(bool(re.match(rf"  (-\w, )?{longest}( |$)", line)) for line in lines) == 1, longest
        assert option.help is not None
        assert re.match(r"[A-Z].*\.$", option.help, re.DOTALL), longest


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_section_has_more_than_ten_options(name: str) -> None:
    options = [each for each in cli.commands[name].params if isinstance(each, click.Option)]
    sections = [each.section if isinstance(each, SectionedOption) else OTHER for each in options]
    assert max(map(sections.count, sections), default=0) <= 10


def test_help_of_up_fits_on_a_terminal_of_80_by_40() -> None:
    shown = run_here("up", "-h", env={"COLUMNS": "80", "LINES": "40"}).stdout.splitlines()
    assert len(shown) < 40  # the prompt takes a line
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("name", ["local", "up"])
def test_defaults_and_choices_in_help_match_the_spec_model(name: str) -> None:
    fields = {**ClusterSpec.model_fields, **NodeSpec.model_fields, **RestartSpec.model_fields}
    options = [each for each in cli.commands[name].params if isinstance(each, FieldParameter)]
    for option in options:
        field = fields[PATHS[option.field][-1]]  # type: ignore[index]  # the last part is always a name
        if option.default_text and field.default is not None:
            assert option.default_text == str(field.default)
        if option.field.choices:
            assert option.field.choices == get_args(field.annotation)
    assert {option.field for option in options} >= {MAX_RESTARTS, PYTHON}


def test_the_version_option_prints_the_version_of_the_installed_package() -> None:
    ran = CliRunner().invoke(cli, ["--version"], prog_name="distlaunch", obj={})
    assert (ran.exit_code, ran.output) == (0, f"distlaunch {metadata.version('distlaunch')}\n")
