"""Where the value of an option comes from: the command line, its variable, or the file of defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from launcher.cli.defaults import Defaults

NO_DEFAULT = ("", "help", "version")
"""Options without a variable, and without a place in the file: those that have no long name, and these."""
PREFIX = "DISTLAUNCH"
"""The first word of each option's variable."""


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
