"""Writes a spec as YAML with comments; reading the text back gives the same spec."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.described import find_schema_url, read_meanings
from launcher.errors import UsageError
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec

WIDTH = 100

HEADING = """\
# yaml-language-server: $schema={schema}
# A cluster of machines and the program that it runs.
#   distlaunch check {name}
#   distlaunch up {name}
# `distlaunch schema` describes all fields."""
"""Editors find the schema by the first line."""

SUGGESTED: Mapping[str, str] = {
    "program": "{script: train.py, args: [--epochs, 3]}",
    "sync": "{to: ~/project}",
    "checkpoint_directory": "/shared/checkpoints",
    "env": "{NCCL_DEBUG: WARN}",
    "env_from": "[WANDB_API_KEY]",
    "restart": "{max_restarts: 3}",
    "timeouts": "{start_s: 600, drain_s: 300, stop_grace_s: 10}",
}
"""Fields that specs often need, each with an example, which a comment shows if the spec leaves the field out."""


class _Dumper(yaml.SafeDumper):
    """Indents the items of a list, and writes repeated values out."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def render_commented(spec: ClusterSpec, name: str = "SPEC") -> str:
    """The spec as YAML: its fields, each below its meaning, and some fields that it leaves out as comments.

    Args:
        spec: the spec, which reading the text back gives again.
        name: the file's name, for the commands in its first lines.
    """
    values = spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    parts = [HEADING.format(name=name, schema=find_schema_url("spec"))]
    meanings = read_meanings(ClusterSpec)
    for field, info in ClusterSpec.model_fields.items():
        meaning = meanings.get(field) or getattr(info.annotation, "__doc__", None) or ""
        if field in values:
            parts.append(_comment(meaning) + _render(field, values[field]))
            if field == "nodes":
                parts[-1] += "\n" + _comment(f"More fields of a node: {_other_fields(spec)}.").rstrip()
        elif field in SUGGESTED:
            parts.append(f"{_comment(meaning)}# {field}: {SUGGESTED[field]}")
    return "\n\n".join(parts) + "\n"


def _comment(text: str) -> str:
    return "".join(f"{line}\n" for line in textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# "))


def _render(field: str, value: Any) -> str:
    """The field on one line if its value is a scalar; lists and dicts of scalars are written in brackets."""
    flow = None if isinstance(value, (dict, list)) else False
    text: str = yaml.dump(
        {field: value}, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=WIDTH
    )
    return text.rstrip("\n")


def _other_fields(spec: ClusterSpec) -> str:
    used = {name for node in spec.nodes for name in node.model_fields_set}
    return ", ".join(name for name in NodeSpec.model_fields if name not in used)


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Writes a file; overwrites an existing file only with `force`.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint="overwrite it with --force, or name another with -o") from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="check the path, or name another with -o"
        ) from None
