"""The file of defaults: values of options, for all commands or for one."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from launcher.spec.yaml_positions import Marks, PlacedError

FILE = "DISTLAUNCH_CONFIG"
"""The variable that names another file, such as /dev/null."""
READ_LIMIT = 1 << 20
"""More bytes than a YAML file may have here; the parser refuses the file then."""
NO_DEFAULT = ("", "help", "version")
"""Options without a variable, and without a place in the file: those that have no long name, and these."""
PREFIX = "DISTLAUNCH"
"""The first word of each option's variable."""


class Defaults(NamedTuple):
    """The values of options in the file at `path`, as click's `default_map`; none if there is no file."""

    path: Path | None
    values: Mapping[str, Any] = {}
    lines: Mapping[tuple[str, str], int] = {}
    """The line of each value, by its command (such as `export kubernetes`) and its option."""

    def find_place(self, command_path: str, name: str) -> str:
        """The file, the line and the option, for messages; `command_path` is click's."""
        return f"{self.path}:{self.lines[command_path.partition(' ')[2], name]} {name}"


def find_file(environ: Mapping[str, str]) -> Path | None:
    """The path of the file; None without a home directory."""
    if environ.get(FILE):
        return Path(environ[FILE])
    folder = environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(folder) if folder.startswith("/") else Path.home() / ".config") / "distlaunch" / "config.yaml"
    except RuntimeError:  # a user ID without an account, as in some containers
        return None


def read_defaults(group: click.Group, environ: Mapping[str, str]) -> Defaults:
    """Reads the file, and checks that its commands and options exist.

    A top-level key is an option of each command that has it, or a command with options of its own.

    Raises:
        UsageError: the file cannot be read, another user could have written it, or it has errors.
    """
    path = find_file(environ)
    if path is None or not (environ.get(FILE) or os.path.lexists(path)):
        return Defaults(path)
    data = _read(path)
    if not data.strip():
        return Defaults(path)
    from launcher.errors import UsageError
    from launcher.spec.yaml_positions import InvalidFileError, parse_yaml
    from launcher.wording import name_errors

    try:
        values, marks, errors = parse_yaml(data, empty={})
        reader = _Reader(group, marks, errors)
        reader.read(values)
    except InvalidFileError as error:
        count, lines = name_errors(len(error.errors)), error.render(str(path))
        raise UsageError(f"the file of defaults has {count}; nothing was started", evidence=lines) from None
    return Defaults(path, reader.values, reader.lines)


def _read(path: Path) -> bytes:
    from launcher.errors import UsageError

    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(READ_LIMIT)
    except OSError as error:
        raise UsageError(f"cannot read the file of defaults {path}: {error.strerror}") from None
    if data and (found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise UsageError(f"other users can write the file of defaults {path}", hint=f"make it yours: chmod go-w {path}")
    return data


class _Reader:
    """Turns the file's values into click's `default_map`; adds what is wrong with them to `errors`."""

    def __init__(self, group: click.Group, marks: Marks, errors: list[PlacedError]) -> None:
        self.values: dict[str, Any] = {}
        self.lines: dict[tuple[str, str], int] = {}
        self._options = {path: options_of(command) for path, command in walk(group)}
        self._marks = marks
        self._errors = errors

    def read(self, values: Any) -> None:
        """Reads the whole file.

        Raises:
            InvalidFileError: it has errors.
        """
        from launcher.spec.yaml_positions import InvalidFileError

        if isinstance(values, dict):
            self._read_all(values)
        else:
            self._refuse((), "expected options and commands, like `up: {no-live: true}`")
        if self._errors:
            raise InvalidFileError(self._errors)

    def _read_all(self, values: Mapping[str, Any]) -> None:
        of_commands = {name: value for name, value in values.items() if isinstance(value, dict)}
        for name, value in values.items():
            if name not in of_commands:
                self._read_option([path for path in self._options if name in self._options[path]], (name,), value)
        for name, value in of_commands.items():  # they replace what holds for all commands
            self._read_command((name,), value)

    def _read_command(self, place: tuple[str, ...], values: Mapping[str, Any]) -> None:
        path = " ".join(place)
        if not any(f"{each} ".startswith(f"{path} ") for each in self._options):
            self._refuse(place, f"distlaunch has no such command{self._suggest(place[-1], self._options)}", key=True)
            return
        for name, value in values.items():
            if isinstance(value, dict):
                self._read_command((*place, name), value)
            else:
                self._read_option([path] if name in self._options.get(path, ()) else [], (*place, name), value)

    def _read_option(self, paths: Sequence[str], place: tuple[str, ...], value: Any) -> None:
        """Sets the option in these commands."""
        *above, name = place
        if not paths:
            path = " ".join(above)
            known = {each for where in ([path] if path else self._options) for each in self._options.get(where, ())}
            wrong = f"`distlaunch {path}` has no option" if path else "no command has an option"
            self._refuse(place, f"{wrong} {name}{self._suggest(name, known)}", key=True)
        for path in paths:
            option = self._options[path][name]
            try:
                converted = _convert(option, value)
            except ValueError as error:
                self._refuse(place, str(error))
                return
            values = self.values
            for word in path.split():
                values = values.setdefault(word, {})
            values[option.name or ""] = converted
            self.lines[path, name] = self._marks.find(place, key=True).line

    def _refuse(self, place: tuple[str, ...], message: str, *, key: bool = False) -> None:
        from launcher.spec.yaml_positions import PlacedError

        self._errors.append(PlacedError(self._marks.find(place, key=key), place, message))

    @staticmethod
    def _suggest(name: str, known: Iterable[str]) -> str:
        close = difflib.get_close_matches(name, known, 1)
        return f"; did you mean {close[0]}?" if close else ""


def _convert(option: click.Option, value: Any) -> Any:
    """The value for click: text, a list of texts or, for a flag, a bool.

    Raises:
        ValueError: it is no value for this option.
    """
    if option.is_flag:
        if value not in ("true", "false"):
            raise ValueError("expected true or false")
        return value == "true"
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        if any(not isinstance(each, str) for each in values):
            raise ValueError("expected a text or a list of texts")
        return values
    if isinstance(value, str):
        return value
    raise ValueError("expected a single value")


def walk(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yields the group, whose path is empty, and all of its commands, with the words that call them."""
    yield path, group
    for name, command in group.commands.items():
        inner = f"{path} {name}".strip()
        if isinstance(command, click.Group):
            yield from walk(command, inner)
        else:
            yield inner, command


def options_of(command: click.Command) -> dict[str, click.Option]:
    """The options that can have a default, by the names that variables and the file use."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {name: each for each in options if (name := long_name(each)) not in NO_DEFAULT}


def long_name(option: click.Parameter) -> str:
    """The name without dashes that the variable and the file use; empty for an option that has neither."""
    return next((name.removeprefix("--") for name in option.opts if name.startswith("--")), "")


def find_variable(command_path: str, name: str) -> str:
    """The variable that sets the option with this name, like `DISTLAUNCH_UP_RUN_DIR`; `command_path` is click's."""
    return "_".join([PREFIX, *command_path.split()[1:], name]).upper().replace("-", "_")


def name_origin(parameter: click.Parameter, context: click.Context | None) -> str:
    """What an error about the parameter's value names."""
    source = context.get_parameter_source(parameter.name or "") if context is not None else None
    if context is not None and source is ParameterSource.ENVIRONMENT:
        return find_variable(context.command_path, long_name(parameter))
    if context is not None and source is ParameterSource.DEFAULT_MAP:
        defaults: Defaults = context.obj["defaults"]
        return defaults.find_place(context.command_path, long_name(parameter))
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
