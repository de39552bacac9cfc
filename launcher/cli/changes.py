"""The options that change a spec: `--set`, `-e`, and those that its fields carry."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from launcher.cli.completion import complete_settings
from launcher.cli.defaults import name_origin
from launcher.cli.sections import SectionedOption, option
from launcher.cli.values import Duration, OneOf
from launcher.spec.field_options import FieldOption

if TYPE_CHECKING:
    from launcher.spec.changes import Changes
    from launcher.spec.settings import Setting

_GIVEN = "distlaunch.given"


class _Given(NamedTuple):
    """An option that has a given value instead of its default."""

    option: click.Parameter
    value: Any
    origin: str
    source: ParameterSource


class FieldParameter(SectionedOption):
    """The option of a field."""

    def __init__(self, *args: Any, field: FieldOption, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.field = field
        self.bare = field.bare


def _note(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    source = context.get_parameter_source(parameter.name or "")
    if source is not None and source is not ParameterSource.DEFAULT:
        given = _Given(parameter, value, name_origin(parameter, context), source)
        context.meta.setdefault(_GIVEN, []).append(given)


setting_option = option(
    "--set",
    section="Cluster",
    multiple=True,
    metavar="FIELD=VALUE",
    shell_complete=complete_settings,
    expose_value=False,
    callback=_note,
    help="Set any field of the spec, like stdin=none.",
)

variable_option = option(
    "-e",
    "--env",
    section="Program",
    multiple=True,
    metavar="NAME[=VALUE]",
    expose_value=False,
    callback=_note,
    help="Set a variable of all tasks, or copy NAME.",
)


def field_option(field: FieldOption) -> Callable[..., Any]:
    """The option of a field."""
    kind: dict[str, Any] = {"metavar": field.metavar} if field.metavar else {"is_flag": True}
    if field.choices:
        kind["type"] = OneOf(field.choices)
    elif field.is_duration:
        kind["type"] = Duration(field.bare)
    return option(
        f"--{field.name}",
        cls=FieldParameter,
        field=field,
        **kind,
        section=field.section,
        default_text=field.default_text,
        expose_value=False,
        callback=_note,
        help=field.help,
    )


def find_value(context: click.Context, field: FieldOption, default: Any) -> Any:
    """The value of a field's option, or the default."""
    return next((each.value for each in _read(context) if getattr(each.option, "field", None) is field), default)


def find_given(context: click.Context) -> set[str]:
    """The names of the options that have a given value instead of their default."""
    return {each.option.name or "" for each in _read(context)}


def find_variables(context: click.Context) -> dict[str, str]:
    """The variables of `-e`; one without a value has the value that it has here, or an empty one."""
    parts = (text.partition("=") for text in _variables_of(_read(context)))
    return {name: value if mark else os.environ.get(name, "") for name, mark, value in parts}


def read_changes(context: click.Context) -> Changes:
    """The changes to a spec from the options, their variables and the file of defaults.

    Raises:
        UsageError: the text of a setting is wrong.
    """
    from launcher.spec.changes import Changes

    given = _read(context)
    defaults = [each for each in given if each.source is ParameterSource.DEFAULT_MAP]
    changes = [each for each in given if each.source is not ParameterSource.DEFAULT_MAP]
    return Changes(
        settings=_settings_of(changes),
        variables=_variables_of(changes),
        default_settings=_settings_of(defaults),
        default_variables=_variables_of(defaults),
    )


def _settings_of(given: Sequence[_Given]) -> tuple[Setting, ...]:
    from launcher.spec.settings import parse_setting, set_option

    settings: list[Setting] = []
    for each in given:
        if isinstance(each.option, FieldParameter):
            settings.append(set_option(each.option.field, each.value, each.origin))
        elif each.option.name == "set":
            settings += [parse_setting(text, each.origin) for text in each.value]
    return tuple(settings)


def _variables_of(given: Sequence[_Given]) -> tuple[str, ...]:
    return tuple(text for each in given if each.option.name == "env" for text in each.value)


def _read(context: click.Context) -> list[_Given]:
    """The given values: the file of defaults, variables, command line; in each, `--set` before options of fields."""
    order = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
    given: list[_Given] = context.meta.get(_GIVEN, [])
    return sorted(given, key=lambda each: (order.index(each.source), isinstance(each.option, FieldParameter)))
