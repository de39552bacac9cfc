"""Changes of single fields of a spec: `--set FIELD=VALUE`, and the options that fields carry.

The changed spec is validated as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.spec.command_line import check_text
from launcher.spec.contradictions import Path, render_path
from launcher.spec.explain import FieldError, find_errors, refuse_options
from launcher.spec.field_options import FieldOption
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass

_PATH = re.compile(r"\w+(?:\.\w+|\[[0-9]{1,6}\])*", re.ASCII)
_PART = re.compile(r"(\w+)|\[([0-9]+)\]", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """The value of the field at `path`, as a spec file has it: text, lists and dicts."""

    path: Path
    value: Any
    origin: str
    """The name in errors, such as the option, without the value, which may be a secret."""


class _NoPlaceError(Exception):
    """The spec has no such place."""


def parse_setting(text: str, origin: str = "--set") -> Setting:
    """A setting such as `restart.max_restarts=3`, `nodes[0].python=/opt/python` or `preload=[numpy]`.

    Raises:
        UsageError: the text is not a field and a value in YAML.
    """
    check_text(text)
    name, equals, value = text.partition("=")
    if not equals or not _PATH.fullmatch(name):
        raise UsageError(
            f"{origin} {name[:80]!r}: expected FIELD=VALUE, like restart.max_restarts=3 or nodes[0].spare=true"
        )
    path = tuple(word or int(number) for word, number in _PART.findall(name))
    return Setting(path, _parse_value(value, f"{origin} {name}"), f"{origin} {render_path(path)}")


def set_option(option: FieldOption, value: Any, origin: str = "") -> Setting:
    """The setting of the field that carries the option; of every node's field, it sets that of the first node."""
    if isinstance(value, str):
        check_text(value)
    return Setting(PATHS[option], value, origin or f"--{option.name}")


def set_fields(spec: ClusterSpec, given: Sequence[str | Setting], *, defaults: Sequence[Setting] = ()) -> ClusterSpec:
    """The spec with these settings; of several settings of a field, the last one wins.

    Args:
        spec: the spec.
        given: settings, or their texts as for `--set`.
        defaults: settings that apply to fields without a value in the spec.

    Raises:
        UsageError: the spec would not be valid; the error names every setting at fault.
    """
    if not given and not defaults:
        return spec
    values = spec.model_dump(mode="json", exclude_unset=True)
    settings = [setting for setting in defaults if not _has(values, setting.path)]
    settings += [parse_setting(each) if isinstance(each, str) else each for each in given]
    problems = []
    for setting in settings:
        try:
            _put(values, setting)
        except _NoPlaceError as error:
            problems.append(f"{setting.origin}: {error}")
    if problems:
        raise refuse_options(problems)
    try:
        return ClusterSpec.model_validate(values)
    except ValidationError as error:
        raise refuse_options([_explain(problem, settings) for problem in find_errors(error)]) from None


def _find_paths(model: type[BaseModel], above: Path = ()) -> Iterator[tuple[FieldOption, Path]]:
    for name, field in model.model_fields.items():
        yield from ((mark, (*above, name)) for mark in field.metadata if isinstance(mark, FieldOption))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _find_paths(field.annotation, (*above, name))


PATHS = {**dict(_find_paths(ClusterSpec)), **dict(_find_paths(NodeSpec, ("nodes", 0)))}
"""The place of each field with an option of its own."""


def _parse_value(text: str, option: str) -> Any:
    if not text.strip():
        return text.strip()
    if text.lstrip().startswith("#"):
        raise UsageError(f"{option}: `#` begins a comment in YAML; quote the value for YAML, too: '\"#…\"'")
    from launcher.spec.yaml_positions import InvalidFileError, parse_yaml  # slower to import than everything else here

    try:
        value, _, errors = parse_yaml(text.encode())
    except InvalidFileError as error:
        errors = error.errors
    if errors:
        raise refuse_options([f"{option}: {error.message}" for error in errors])
    return value


def _has(values: Any, path: Path) -> bool:
    """Whether there is a value at this path."""
    for part in path:
        if isinstance(values, dict):
            inside = part in values
        else:
            inside = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if not inside:
            return False
        values = values[part]
    return True


def _put(values: Any, setting: Setting) -> None:
    """Sets the value at its path; adds fields on the way there that the spec leaves out."""
    for depth, part in enumerate(setting.path):
        above = render_path(setting.path[:depth])
        if isinstance(part, int):
            if not isinstance(values, list):
                raise _NoPlaceError(f"{above} is not a list in the spec; set {above} as a whole")
            if part >= len(values):
                last = f"its last item is {above}[{len(values) - 1}]" if values else f"set {above} as a whole"
                raise _NoPlaceError(f"{above} has {count_of(len(values), 'item')}; {last}")
        elif not isinstance(values, dict):
            raise _NoPlaceError(f"{above} {'is a list' if isinstance(values, list) else 'has no fields'}")
        if depth == len(setting.path) - 1:
            values[part] = setting.value
        elif isinstance(values, dict) and part not in values:
            values = values.setdefault(part, [] if isinstance(setting.path[depth + 1], int) else {})
        else:
            values = values[part]


def _explain(problem: FieldError, settings: Sequence[Setting]) -> str:
    """Renders the problem with the option whose path is nearest; only fields that an option sets can be invalid."""
    nearest = max(reversed(settings), key=lambda setting: _count_common(setting.path, problem.path))
    if problem.path == nearest.path:
        return f"{nearest.origin}: {problem.message}"
    return f"{nearest.origin}: {render_path(problem.path)}: {problem.message}"


def _count_common(one: Path, other: Path) -> int:
    """The number of equal parts at the beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
