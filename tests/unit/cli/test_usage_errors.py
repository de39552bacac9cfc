"""Errors of the command line have the style of all errors: what is wrong, and what to type instead."""

from __future__ import annotations

import re

import click
import pytest

from launcher.cli.main import cli
from launcher.cli.sections import Group, SectionedCommand
from launcher.cli.usage_errors import MEANT
from tests.harness.processes.in_process import run_here


def refused(*words: str) -> tuple[str, str]:
    """The message and the hint of a command line that is refused."""
    done = run_here(*words)
    found = re.fullmatch(r"Error: (.*) \[usage\]\n  (.*)\n", done.stderr)
    assert (done.returncode, done.stdout) == (2, "")
    assert found is not None, done.stderr
    return found[1], found[2]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("nothing", "`distlaunch` has no command nothing", "`distlaunch -h` lists its commands"),
        ("statsu", "`distlaunch` has no command statsu", "did you mean status? `distlaunch -h` lists its commands"),
        (
            "versoin",
            "`distlaunch` has no command versoin",
            "did you mean --version? `distlaunch -h` lists its commands",
        ),
        ("export k8s", "`distlaunch export` has no command k8s", "`distlaunch export -h` lists its commands"),
        ("--foo", "`distlaunch` has no option --foo", "`distlaunch -h` shows its options"),
        ("ls --al", "`distlaunch ls` has no option --al", "did you mean --all? `distlaunch ls -h` shows its options"),
        ("ls --all=3", "--all takes no value", "`distlaunch ls -h` shows its options"),
        ("ls x", "`distlaunch ls` does not take the argument x", "usage: distlaunch ls [OPTIONS]"),
        ("ls x y", "`distlaunch ls` does not take the arguments x y", "usage: distlaunch ls [OPTIONS]"),
        ("plan", "`distlaunch plan` needs SPEC", "usage: distlaunch plan [OPTIONS] SPEC"),
        ("local -n", "-n needs a value, N", "`distlaunch local -h` shows its options"),
        (
            "local --workers 0",
            "--workers: expected a whole number of at least 1, not 0",
            "`distlaunch local -h` shows its options",
        ),
        (
            "local -n many",
            "--workers: expected a whole number of at least 1, not many",
            "`distlaunch local -h` shows its options",
        ),
        (
            "compose s.yaml --nodes 65",
            "--nodes: expected a whole number from 1 to 64, not 65",
            "`distlaunch compose -h` shows its options",
        ),
        (
            "local --lease=9",
            "`distlaunch local` has no option --lease",
            "write --set timeouts.lease_s=S",
        ),
        ("local --framework horovod", "--framework: expected tensorflow, torch or jax, not horovod", ""),
        ("completion zhs", "SHELL: expected bash, zsh or fish, not zhs", "did you mean zsh?"),
        (
            "prune --older-than 30",
            "--older-than: expected a duration such as 30d, 12h, 1h30m or 90s, not 30",
            "`distlaunch prune -h` shows its options",
        ),
    ],
)
def test_click_errors_are_shown_in_the_format_of_distlaunch(words: str, message: str, hint: str) -> None:
    if hint:
        assert refused(*words.split()) == (message, hint)
    else:
        assert run_here(*words.split()).stderr == f"Error: {message} [usage]\n"


@pytest.mark.parametrize("name", sorted(MEANT))
def test_a_command_name_from_another_tool_gets_a_suggestion(name: str) -> None:
    for meant in MEANT[name]:
        assert meant in cli.commands or meant in ("--help", "--version")
    assert refused(name)[1] == f"did you mean {' or '.join(MEANT[name])}? `distlaunch -h` lists its commands"


@pytest.mark.parametrize("name", ["pruen", "prun", "r", "rmm", "rn", "prune-all"])
def test_typos_never_get_a_suggestion_of_prune_or_rm(name: str) -> None:
    assert not re.search(r"\b(prune|rm)\b\?", refused(name)[1])


def test_every_command_uses_the_classes_that_format_usage_errors() -> None:
    commands = [*cli.commands.values()]
    for command in commands:
        if isinstance(command, click.Group):
            assert isinstance(command, Group)
            commands += command.commands.values()
        else:
            assert isinstance(command, SectionedCommand)
    assert len(commands) > 20


def test_distlaunch_without_arguments_prints_help_with_status_2() -> None:
    done = run_here()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: distlaunch [OPTIONS] COMMAND")
