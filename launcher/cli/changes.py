"""The options that change a spec: `--set`, `-e`, and those that its fields carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from launcher.cli.completion import complete_settings
from launcher.cli.origins import name_origin
from launcher.cli.sections import SectionedOption, option
from launcher.cli.values import Duration, OneOf
from launcher.spec.field_options import FieldOption

if TYPE_CHECKING:
    from launcher.spec.changes import Changes

_GIVEN = "distlaunch.given"


class _Given(NamedTuple):
    """The value of an option that is not its default."""

    option: click.Parameter
    value: Any
    origin: str
    source: ParameterSource


class FieldParameter(SectionedOption):
    """The option of a field."""

    def __init__(self, *args: Any, field: FieldOption, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.field = field


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
        kind["type"] = Duration()
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


def read_changes(context: click.Context) -> Changes:
    """What the options, their variables and the file of defaults change in a spec.

    Raises:
        UsageError: the text of a setting is wrong.
    """
    from launcher.spec.changes import Changes
    from launcher.spec.settings import Setting, parse_setting, set_option

    settings: list[tuple[bool, Setting]] = []
    variables: list[tuple[bool, str]] = []
    for given in _read(context):
        is_default = given.source is ParameterSource.DEFAULT_MAP
        if isinstance(given.option, FieldParameter):
            settings.append((is_default, set_option(given.option.field, given.value, given.origin)))
        elif given.option.name == "set":
            settings += [(is_default, parse_setting(text, given.origin)) for text in given.value]
        else:
            variables += [(is_default, text) for text in given.value]
    return Changes(
        settings=tuple(setting for is_default, setting in settings if not is_default),
        variables=tuple(text for is_default, text in variables if not is_default),
        default_settings=tuple(setting for is_default, setting in settings if is_default),
        default_variables=tuple(text for is_default, text in variables if is_default),
    )


def _read(context: click.Context) -> list[_Given]:
    """The values that are given: variables before the command line; in each, `--set` before options of fields."""
    order = (ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)
    given: list[_Given] = context.meta.get(_GIVEN, [])
    return sorted(given, key=lambda each: (order.index(each.source), isinstance(each.option, FieldParameter)))
