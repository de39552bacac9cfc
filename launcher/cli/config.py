"""The command that shows where the values of options come from."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from launcher.cli.defaults import find_variable, options_of, walk
from launcher.cli.options import json_option
from launcher.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from launcher.cli.defaults import Defaults

PROGRAM = "distlaunch"
HIDES = ("env", "set")
"""Options whose values may be secrets."""


class Value(NamedTuple):
    """The value of an option, and where it comes from: a variable, a line of the file, or nowhere."""

    command: str
    option: str
    value: str
    origin: str
    variable: str


@click.command(cls=SectionedCommand)
@json_option
@click.argument("command", nargs=-1)
@click.pass_context
def config(context: click.Context, /, as_json: bool, command: tuple[str, ...]) -> int:
    """Show the defaults of options, and where they come from.

    A variable, like DISTLAUNCH_UP_MAX_RESTARTS, or ~/.config/distlaunch/config.yaml sets the default of an option:

    \b
    python: /opt/tf/bin/python        # for all commands with --python
    up: {max-restarts: 3, env: [A=1]} # for one command

    The command line wins over variables, variables over the spec, and the spec over the file. With COMMAND, shows all
    options of this command.

    Exit status: 0, or 2 if a variable belongs to no option.
    """
    defaults: Defaults = context.obj["defaults"]
    group = context.find_root().command
    assert isinstance(group, click.Group)
    commands = dict(walk(group))
    wanted = " ".join(command)
    if wanted and wanted not in commands:
        from launcher.cli.usage_errors import refuse_command

        raise refuse_command(wanted, [name for name in commands if name], PROGRAM)
    found = [value for path, each in commands.items() for value in _read(path, each, defaults, os.environ)]
    shown = [value for value in found if (value.command == wanted if wanted else value.origin)]
    unknown = [*_find_unknown(found, os.environ)]
    if as_json:
        values = [value._asdict() for value in shown]
        click.echo(json.dumps({"file": str(defaults.path or ""), "values": values, "unknown": unknown}, indent=2))
    else:
        _show(shown, defaults, wanted)
        for line in unknown:
            click.echo(line, err=True)
    return 2 if unknown else 0


def _read(path: str, command: click.Command, defaults: Defaults, environ: Mapping[str, str]) -> Iterator[Value]:
    """Yields the options of the command at this path."""
    for name, option in options_of(command).items():
        variable = find_variable(f"{PROGRAM} {path}", name)
        if environ.get(variable):
            value, origin = environ[variable], variable
        elif (path, name) in defaults.lines:
            value = _render(_find(defaults.values, path, option.name or ""))
            origin = f"{defaults.path}:{defaults.lines[path, name]}"
        else:
            value, origin = str(getattr(option, "default_text", "")), ""
        yield Value(path, name, value if name not in HIDES or not origin else _hide(name, value), origin, variable)


def _find(values: Mapping[str, Any], path: str, name: str) -> Any:
    for word in path.split():
        values = values[word]
    return values[name]


def _render(value: Any) -> str:
    if isinstance(value, list):
        import shlex

        return shlex.join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _hide(name: str, text: str) -> str:
    """The words of the text without the values of variables, and without secrets."""
    import shlex

    from launcher.spec.redaction import hide_command

    words = [word for each in shlex.split(text) for word in (f"--{name}", each)]
    return shlex.join(hide_command(words)[1::2])


def _find_unknown(known: list[Value], environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each variable that has the form of an option's, but sets none."""
    names = {value.variable for value in known}
    starts = {find_variable(f"{PROGRAM} {value.command}", "") for value in known if value.command}
    for name in sorted(environ.keys() - names):
        start = max((start for start in starts if name.startswith(start)), key=len, default="")
        if start:
            ends = [each.removeprefix(start) for each in names if each.startswith(start)]
            close = difflib.get_close_matches(name.removeprefix(start), ends, 1)
            yield f"{name} is the variable of no option{f'; did you mean {start}{close[0]}?' if close else ''}"


def _show(values: list[Value], defaults: Defaults, command: str) -> None:
    from launcher.cli.watching import find_width
    from launcher.report.table import Column, render_table

    there = defaults.path is not None and os.path.lexists(defaults.path)
    click.echo(f"File: {defaults.path or 'none, because there is no home directory'}{'' if there else ' (missing)'}")
    if not values:
        click.echo("Neither a variable nor the file sets an option.")
        return
    columns = [Column("COMMAND", 90), Column("OPTION", 100), Column("VALUE", 95, 10), Column("FROM", 80, 10)]
    if command:
        columns = [*columns[1:], Column("VARIABLE", 60, 10)]
    rows = [
        [
            *([] if command else [value.command or "(all)"]),
            f"--{value.option}",
            value.value or "-",
            value.origin or "-",
            *([value.variable] if command else []),
        ]
        for value in values
    ]
    click.echo("\n".join(render_table(columns, rows, find_width())))
