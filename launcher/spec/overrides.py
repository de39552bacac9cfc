"""Command-line options that override fields of a spec; the result is validated like any spec."""

from __future__ import annotations

from typing import Any

from pydantic_core import ValidationError

from launcher.spec.contradictions import Path
from launcher.spec.mistakes import explain_option, refuse_options
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import Model
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Override:
    """The value that an option gives to the field at `path`; None leaves the field unchanged."""

    option: str
    path: Path
    value: Any


def override(spec: ClusterSpec, *overrides: Override) -> ClusterSpec:
    """The spec with these values.

    Raises:
        UsageError: the spec would not be valid; the error names every option at fault.
    """
    problems: list[str] = []
    for each in overrides:
        if each.value is None:
            continue
        try:
            spec = _replace(spec, each.path, each.value)
        except ValidationError as error:
            problems += explain_option(each.option, error, each.path)
    if problems:
        raise refuse_options(problems)
    return spec


def _replace(old: Any, path: Path, value: Any) -> Any:
    """`old` with the value at the path, validated at every level."""
    if not path:
        return value
    name, rest = path[0], path[1:]
    if isinstance(old, Model):
        return old.changed(**{str(name): _replace(getattr(old, str(name)), rest, value)})
    return [_replace(item, rest, value) if index == name else item for index, item in enumerate(old)]
