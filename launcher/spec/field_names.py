"""The names of a spec's fields at a place, and the values that a field can have, for shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec


def find_fields(path: str) -> Iterator[str]:
    """Yields the fields at a path such as `restart`, each with the `.` or `=` that follows it; none if it has none."""
    model = _find_model(path)
    for name, field in model.model_fields.items() if model is not None else ():
        if name == "nodes":
            yield "nodes[0]."
        else:
            yield f"{name}{'.' if _models_of(field.annotation) else '='}"


def find_values(path: str) -> list[str]:
    """The values of a field with few."""
    above, _, name = path.rpartition(".")
    model = _find_model(above)
    field = model.model_fields.get(name) if model is not None else None
    return [*dict.fromkeys(_values_of(field.annotation))] if field is not None else []


def _find_model(path: str) -> type[BaseModel] | None:
    model: type[BaseModel] | None = ClusterSpec
    for part in filter(None, path.split(".")):
        name = part.partition("[")[0]
        field = model.model_fields.get(name) if model is not None else None
        if field is None:
            return None
        model = NodeSpec if name == "nodes" else next(iter(_models_of(field.annotation)), None)
    return model


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_of(part)]


def _values_of(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(value) if not isinstance(value, bool) else str(value).lower() for value in get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _values_of(part)
