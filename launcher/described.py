"""What a JSON Schema says beside the types: its address, and the meanings of fields.

The meanings are the docstrings below the fields, read from the source when a schema or a comment needs them.

pydantic can read the docstrings when it creates a class, but that would take a quarter of the start of each run.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from importlib import metadata
from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The version of JSON Schema that pydantic writes."""


def find_schema_url(what: str) -> str:
    """Where the JSON Schema of this version of distlaunch is published; `what`: an argument of `distlaunch schema`."""
    version = metadata.version("distlaunch")
    return f"https://github.com/distlaunch/distlaunch/releases/download/v{version}/{what}.schema.json"


def describe(schema: dict[str, Any], model: type[Any]) -> None:
    """Adds the meanings of a model's fields to its JSON Schema; made for `json_schema_extra`."""
    for name, meaning in read_meanings(model).items():
        field = schema["properties"].get(name)
        if field is not None:
            field.setdefault("description", meaning)


def read_meanings(model: type[Any]) -> dict[str, str]:
    """The docstrings of a model's fields, by the fields' external names."""
    meanings = {}
    for base in reversed(model.__mro__):
        if hasattr(base, "model_fields") and not base.__module__.startswith("pydantic."):
            meanings.update(_read_docstrings(base))
    fields = model.model_fields
    return {fields[name].alias or name: text for name, text in meanings.items() if name in fields}


def _read_docstrings(cls: type[Any]) -> dict[str, str]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
