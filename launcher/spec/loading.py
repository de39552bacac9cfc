"""Reads a cluster spec from YAML, and reports all errors at once, each with its line and column.

Scalars arrive as the text in the file (see `yaml_positions`); the models' types define what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import ValidationError

from launcher.errors import SpecError
from launcher.spec.contradictions import Path
from launcher.spec.explain import find_errors
from launcher.spec.models import ClusterSpec
from launcher.spec.yaml_positions import SIZE_LIMIT, InvalidFileError, Mark, Marks, PlacedError, parse_yaml
from launcher.wording import name_errors


def load_spec(path: FilePath, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """Reads and checks a spec file.

    Args:
        path: the file.
        environ: if given, must have every variable that the spec takes from the environment.

    Raises:
        SpecError: the file cannot be read, or has errors.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise SpecError(f"cannot read the spec {path}: {error.strerror}", hint="check the path") from None
    try:
        return parse_spec(data, environ)
    except InvalidFileError as error:
        count, lines = name_errors(len(error.errors)), error.render(str(path))
        raise SpecError(f"the spec has {count}; nothing was started", evidence=lines) from None


def parse_spec(data: bytes, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """Parses and checks the bytes of a spec file.

    Raises:
        InvalidFileError: the file has errors; `load_spec` renders them.
    """
    values, marks, errors = parse_yaml(data)
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else "a single value"
        raise InvalidFileError(
            [*errors, PlacedError(Mark(1, 1), (), f"expected fields like `nodes:` at the top, got {what}")]
        )
    try:
        spec = ClusterSpec.model_validate(values)
    except ValidationError as error:
        errors += _errors(error, marks)
        errors += _find_other_contradictions(error, values, marks)
    if environ is not None:
        reported = {error.path for error in errors}
        errors += [
            PlacedError(marks.find(place), place, f"{name} is not set in this environment; export it first")
            for place, name in _find_variables(values)
            if place not in reported and isinstance(name, str) and name not in environ
        ]
    if errors:
        raise InvalidFileError(errors)
    return spec


def _find_variables(values: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the value of each field that names a variable of distlaunch's environment."""
    names, notify = values.get("env_from"), values.get("notify")
    yield from ((("env_from", index), name) for index, name in enumerate(names if isinstance(names, list) else ()))
    if isinstance(notify, dict):
        yield ("notify", "webhook_from"), notify.get("webhook_from")


def _errors(error: ValidationError, marks: Marks) -> Iterator[PlacedError]:
    for problem in find_errors(error):
        around = problem.path[:-1] if problem.is_missing else problem.path
        yield PlacedError(marks.find(around, key=problem.is_key), problem.path, problem.message)


def _find_other_contradictions(error: ValidationError, values: Any, marks: Marks) -> list[PlacedError]:
    """Finds contradictions between fields without errors; none if they may depend on a field with an error."""
    if any(not detail["loc"] for detail in error.errors()):  # these errors are the contradictions
        return []
    paths = [problem.path for problem in find_errors(error)]
    nodes = values["nodes"] if isinstance(values.get("nodes"), list) else []
    for path in paths:
        if path[0] == "nodes" and (not nodes or len(path) < 3 or path[2] in ("host", "tasks")):
            return []
    rest = {**values, **({"nodes": [dict(node) for node in nodes]} if nodes else {})}
    for path in paths:
        if path[0] == "nodes":
            rest["nodes"][path[1]].pop(path[2], None)
        else:
            rest.pop(path[0], None)
    try:
        ClusterSpec.model_validate(rest)
    except ValidationError as second:
        return [*_errors(second, marks)]
    return []
