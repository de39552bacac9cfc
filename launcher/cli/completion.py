"""Shell completion of runs, tasks and specs, and the scripts for bash, zsh and fish.

The scripts come from click. They run `distlaunch` with a variable that click recognises, once for each Tab.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import click

from launcher.cli.sections import SectionedCommand
from launcher.cli.values import OneOf

VARIABLE = "_DISTLAUNCH_COMPLETE"
SPEC_SUFFIXES = (".yaml", ".yml")

_BASH = """\
%(complete_func)s() {
    local response type value
    response=$(env COMP_WORDS="$(printf '%%s\\n' "${COMP_WORDS[@]}")" COMP_CWORD="$COMP_CWORD" \
%(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            plain) COMPREPLY+=("$value") ;;
            dir) compopt -o plusdirs -o filenames ;;
            file) compopt -o default -o filenames ;;
        esac
    done <<< "$response"
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""Replaces click's script, which loses names with spaces and does not complete folders together with other names."""


def prepare() -> None:
    """Registers our script for bash; called when a shell asks."""
    from click.shell_completion import BashComplete, CompletionItem, add_completion_class

    class Bash(BashComplete):
        source_template = _BASH
        _cut = ""
        """The beginning of the word, up to a colon, which bash takes for a separate word."""

        def get_completion_args(self) -> tuple[list[str], str]:
            arguments, incomplete = super().get_completion_args()
            words = join_at_colons([*arguments, incomplete])
            if len(words) <= len(arguments):
                self._cut = words[-1][: words[-1].rfind(":") + 1]
            return words[:-1], words[-1]

        def format_completion(self, item: CompletionItem[Any]) -> str:
            return f"{item.type},{str(item.value).removeprefix(self._cut)}"

    add_completion_class(Bash)


def join_at_colons(words: list[str]) -> list[str]:
    """Joins `worker`, `:`, `0`: bash ends a word at a colon and makes the colon a word."""
    joined: list[str] = []
    glued = False
    for word in words:
        if joined and (glued or word == ":"):
            joined[-1] += word
        else:
            joined.append(word)
        glued = word == ":"
    return joined


@click.command(cls=SectionedCommand)
@click.argument("shell", type=OneOf(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, runs, tasks and specs.

    \b
    bash:  source <(distlaunch completion bash)
    zsh:   distlaunch completion zsh > ~/.zfunc/_distlaunch
    fish:  distlaunch completion fish > ~/.config/fish/completions/distlaunch.fish

    For bash, put this line in ~/.bashrc. For zsh, ~/.zfunc must be in fpath before compinit runs.
    """
    from click.shell_completion import get_completion_class

    prepare()
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root()
    click.echo(kind(root.command, {}, "distlaunch", VARIABLE).source(), nl=False)


def complete_runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """All runs, the latest first."""
    return _complete_names(incomplete, (True, False))


def complete_running_runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The runs that are running, the latest first."""
    return _complete_names(incomplete, (True,))


def complete_ended_runs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The runs that are not running, the latest first."""
    return _complete_names(incomplete, (False,))


def complete_runs_or_specs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    return complete_specs(context, parameter, incomplete) + complete_ended_runs(context, parameter, incomplete)


def complete_specs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """YAML files, and folders."""
    from click.shell_completion import CompletionItem

    folder, _, start = incomplete.rpartition("/")
    place = Path(f"{folder}/" if "/" in incomplete else ".")
    try:
        with os.scandir(place.expanduser()) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(SPEC_SUFFIXES) and entry.is_file())
    except (OSError, RuntimeError):
        names = []
    before = incomplete[: len(incomplete) - len(start)]
    folders = CompletionItem(incomplete, type="dir")
    return [folders, *(CompletionItem(before + name) for name in names if name.startswith(start))]


def complete_tasks(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The tasks of the run that precedes them on the command line."""
    from click.shell_completion import CompletionItem

    from launcher.errors import DistlaunchError
    from launcher.run.selection import select_run

    try:
        plan = json.loads(select_run(context.params.get("run"), reads=True).plan.read_bytes())
        tasks = [str(task["task"]) for task in plan["tasks"]]
    except (DistlaunchError, OSError, ValueError, KeyError, TypeError):
        return []
    return [CompletionItem(task) for task in tasks if task.startswith(incomplete)]


def _complete_names(incomplete: str, wanted: Container[bool]) -> list[Any]:
    """The runs whose names begin with `incomplete`; if there are none, the only run whose name contains it.

    `wanted` has True for running runs and False for the others.
    """
    from click.shell_completion import CompletionItem

    from launcher.errors import DistlaunchError
    from launcher.run.selection import find_runs, summarize_if_there
    from launcher.run.summary import find_controller
    from launcher.wording import render_age

    now = time.time()
    found = []
    try:
        runs = [(files, record) for files, record in find_runs() if incomplete in files.root.name]
    except DistlaunchError:  # no home directory
        return []
    for files, record in runs:
        running = find_controller(files, record) is not None
        if running in wanted and files.root.name.isprintable():
            summary = None if running else summarize_if_there(files)
            state = "running" if summary is None else summary.state
            help_text = f"{state}, {render_age(now - record.started)}"
            found.append(CompletionItem(files.root.name, help=help_text))
    first = [item for item in found if item.value.startswith(incomplete)]
    return first or (found if len(found) == 1 else [])
