"""`--set FIELD=VALUE`: sets any field of a spec from the command line; the spec is then validated as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.spec.command_line import check_text
from launcher.spec.contradictions import Path, render_path
from launcher.spec.mistakes import Problem, find_problems, refuse_options
from launcher.spec.models import ClusterSpec
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass

_PATH = re.compile(r"\w+(?:\.\w+|\[[0-9]{1,6}\])*", re.ASCII)
_PART = re.compile(r"(\w+)|\[([0-9]+)\]", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """The value of the field at `path`, as a spec file has it: text, lists and dicts."""

    path: Path
    value: Any

    @property
    def option(self) -> str:
        """The option without its value, which may be a secret."""
        return f"--set {render_path(self.path)}"


class _NoPlaceError(Exception):
    """The spec has no such place."""


def set_fields(spec: ClusterSpec, texts: Sequence[str]) -> ClusterSpec:
    """The spec with these settings, like `restart.max_restarts=3`, `nodes[0].python=/opt/python` or `preload=[numpy]`;
    of several settings of a field, the last one wins.

    Raises:
        UsageError: the spec would not be valid; the error names every option at fault.
    """
    if not texts:
        return spec
    settings = [_parse(text) for text in texts]
    values = spec.model_dump(mode="json", exclude_unset=True)
    problems = []
    for setting in settings:
        try:
            _put(values, setting)
        except _NoPlaceError as error:
            problems.append(f"{setting.option}: {error}")
    if problems:
        raise refuse_options(problems)
    try:
        return ClusterSpec.model_validate(values)
    except ValidationError as error:
        raise refuse_options([_explain(problem, settings) for problem in find_problems(error)]) from None


def _parse(text: str) -> Setting:
    check_text(text)
    name, equals, value = text.partition("=")
    if not equals or not _PATH.fullmatch(name):
        raise UsageError(
            f"--set {name[:80]!r}: expected FIELD=VALUE, like restart.max_restarts=3 or nodes[0].spare=true"
        )
    path = tuple(word or int(number) for word, number in _PART.findall(name))
    return Setting(path, _parse_value(value, f"--set {name}"))


def _parse_value(text: str, option: str) -> Any:
    if not text.strip():
        return text.strip()
    if text.lstrip().startswith("#"):
        raise UsageError(f"{option}: `#` begins a comment in YAML; quote the value for YAML, too: '\"#…\"'")
    from launcher.spec.yaml_positions import MistakesError, parse_yaml  # slower to import than everything else here

    try:
        value, _, mistakes = parse_yaml(text.encode())
    except MistakesError as error:
        mistakes = error.mistakes
    if mistakes:
        raise refuse_options([f"{option}: {mistake.message}" for mistake in mistakes])
    return value


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


def _explain(problem: Problem, settings: Sequence[Setting]) -> str:
    """Renders the problem with the option whose path is nearest; only fields that an option sets can be invalid."""
    nearest = max(reversed(settings), key=lambda setting: _count_common(setting.path, problem.path))
    if problem.path == nearest.path:
        return f"{nearest.option}: {problem.message}"
    return f"{nearest.option}: {render_path(problem.path)}: {problem.message}"


def _count_common(one: Path, other: Path) -> int:
    """The number of equal parts at the beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
