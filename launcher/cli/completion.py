"""Shell completion of runs, tasks and specs, and the scripts for bash, zsh and fish.

The scripts come from click. They run `distlaunch` with a variable that click recognises, once for each Tab.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import click

from launcher.cli.sections import SectionedCommand
from launcher.cli.values import OneOf

VARIABLE = "_DISTLAUNCH_COMPLETE"
SPEC_SUFFIXES = (".yaml", ".yml")
BREAKS = (":", "=")
"""Characters at which bash ends a word."""
INCLUDES = 8
"""How deeply files of OpenSSH's configuration may include each other; OpenSSH allows 16."""

_BASH = """\
%(complete_func)s() {
    local response type value
    response=$(env COMP_WORDS="$(printf '%%s\\n' "${COMP_WORDS[@]}")" COMP_CWORD="$COMP_CWORD" \
%(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            plain)
                COMPREPLY+=("$value")
                case $value in *[.=,]) compopt -o nospace ;; esac
                ;;
            dir) compopt -o plusdirs -o filenames ;;
            file) compopt -o default -o filenames ;;
        esac
    done <<< "$response"
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
"""Replaces click's script, which loses names with spaces and does not complete folders together with other names."""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a plain described open response
    (( ! $+commands[%(prog_name)s] )) && return 1
    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
%(complete_var)s=zsh_complete %(prog_name)s)}")
    for type key descr in ${response}; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            plain)
                if [[ "$key" == *[.=,] ]]; then
                    open+=("${key//\\\\:/:}")
                elif [[ "$descr" == "_" ]]; then
                    plain+=("$key")
                else
                    described+=("$key":"$descr")
                fi
                ;;
        esac
    done
    [ -n "$described" ] && _describe -V unsorted described -U
    [ -n "$plain" ] && compadd -U -V unsorted -a plain
    [ -n "$open" ] && compadd -S '' -U -V unsorted -a open
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""
"""Replaces click's script, which puts a space after a word that is to be continued, such as `restart.`."""

_FISH = """\
function %(complete_func)s
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \
COMP_CWORD=(commandline -t) %(prog_name)s)
    for completion in $response
        set -l parts (string split -m 1 "," -- $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case plain
                echo -- $parts[2]
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""
"""Replaces click's script, which ends a description at its first comma."""


def prepare() -> None:
    """Registers our scripts; called when a shell asks."""
    from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete, add_completion_class

    class Zsh(ZshComplete):
        source_template = _ZSH

    class Fish(FishComplete):
        source_template = _FISH

    class Bash(BashComplete):
        source_template = _BASH
        _cut = ""
        """The beginning of the word, up to a colon or `=`, which bash takes for a separate word."""

        def get_completion_args(self) -> tuple[list[str], str]:
            arguments, incomplete = super().get_completion_args()
            words = join_words([*arguments, incomplete])
            if len(words) <= len(arguments):
                self._cut = words[-1][: max(map(words[-1].rfind, BREAKS)) + 1]
            return words[:-1], words[-1]

        def format_completion(self, item: CompletionItem[Any]) -> str:
            return f"{item.type},{str(item.value).removeprefix(self._cut)}"

    for shell in (Bash, Zsh, Fish):
        add_completion_class(shell)


def join_words(words: list[str]) -> list[str]:
    """Joins `worker`, `:`, `0`: bash ends a word at a colon or `=`, and makes that a word."""
    joined: list[str] = []
    glued = False
    for word in words:
        if joined and (glued or word in BREAKS):
            joined[-1] += word
        else:
            joined.append(word)
        glued = word in BREAKS
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
    click.echo(render_script(shell, click.get_current_context().find_root().command), nl=False)


def render_script(shell: str, root: click.Command) -> str:
    """The script for a shell (`bash`, `zsh` or `fish`); `root` is the command `distlaunch`."""
    from click.shell_completion import get_completion_class

    prepare()
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(root, {}, "distlaunch", VARIABLE).source()


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


def complete_hosts(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The hosts of ~/.ssh/config and this machine, after the last comma."""
    from click.shell_completion import CompletionItem

    before, comma, start = incomplete.rpartition(",")
    named = set(before.split(","))
    known = dict.fromkeys(("local", *_read_hosts(Path("~/.ssh/config").expanduser())))
    hosts = [host for host in known if host not in named]
    return [CompletionItem(f"{before}{comma}{host}") for host in hosts if host.startswith(start)]


def _read_hosts(path: Path, depth: int = 0) -> Iterator[str]:
    """The hosts that OpenSSH's configuration names without a pattern."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        keyword, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() == "host":
            yield from (name for name in rest.split() if not set(name) & set('*?!"#'))
        elif keyword.lower() == "include" and depth < INCLUDES:
            for pattern in rest.split():
                place = Path("~/.ssh").expanduser() / Path(pattern).expanduser()
                for found in sorted(place.parent.glob(place.name)):
                    yield from _read_hosts(found, depth + 1)


def complete_settings(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The fields of a spec, one level at a time, and the values of those that have few."""
    from click.shell_completion import CompletionItem

    from launcher.spec.field_names import find_fields, find_values

    name, equals, value = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{name}={each}") for each in find_values(name) if each.startswith(value)]
    above, dot, start = name.rpartition(".")
    return [CompletionItem(f"{above}{dot}{field}") for field in find_fields(above) if field.startswith(start)]


def complete_tasks(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[Any]:
    """The tasks of the run that precedes them on the command line."""
    from click.shell_completion import CompletionItem

    from launcher.errors import DistlaunchError
    from launcher.rundir.record import RecordedRun
    from launcher.rundir.select import select_run

    try:
        tasks = [str(each.task) for each in RecordedRun(select_run(context.params.get("run"), reads=True)).plan.tasks]
    except DistlaunchError:
        return []
    return [CompletionItem(task) for task in tasks if task.startswith(incomplete)]


def _complete_names(incomplete: str, wanted: Container[bool]) -> list[Any]:
    """The runs whose names begin with `incomplete`; if there are none, the only run whose name contains it.

    `wanted` has True for running runs and False for the others.
    """
    from click.shell_completion import CompletionItem

    from launcher.errors import DistlaunchError
    from launcher.rundir.select import find_runs, summarize_if_there
    from launcher.rundir.summary import find_controller
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
