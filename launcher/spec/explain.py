"""Explains pydantic's errors about a spec to its user: the place, what is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import UsageError
from launcher.printable import has_control
from launcher.spec.contradictions import FRAMEWORK_VARIABLES, OWN_VARIABLES, Path, render_path
from launcher.spec.fields import MANY, ONE, PODS
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import ListedNodesSpec, NodeSpec, PodNodesSpec
from launcher.spec.parts import NodeSourceSpec, ProgramSpec
from launcher.spec.redaction import hide_login, hide_text
from launcher.tasks import TASK_TYPES
from launcher.wording import name_errors, shorten
from worker_entry.protocol.frozen import dataclass

_NAMES = {*TASK_TYPES, *OWN_VARIABLES, *(name for names in FRAMEWORK_VARIABLES.values() for name in names)}
"""The keys of mappings that a contradiction may name."""


@dataclass(frozen=True)
class FieldError:
    """One error in a spec. `is_key`: the name of the field at `path` is wrong, not its value."""

    path: Path
    message: str
    is_key: bool = False
    is_missing: bool = False


def find_errors(error: ValidationError) -> Iterator[FieldError]:
    """Yields every reason why pydantic rejected a spec or a part of a spec."""
    for detail in error.errors():
        if detail["type"] == "contradictions":
            for path, message in detail["ctx"]["errors"]:
                is_key = path[-1] in _NAMES
                yield FieldError(path, message, is_key=is_key)
            continue
        path, is_key = _place(detail)
        if detail["type"] == "missing":
            yield FieldError(path, f"is missing; add `{path[-1]}:`", is_missing=True)
        else:
            yield FieldError(path, _explain(detail, path, is_key=is_key), is_key=is_key)


def explain_option(option: str, error: ValidationError) -> list[str]:
    """A line for each error with a spec that a command-line option describes."""
    return [f"{option}: {line}" for line in explain_fields(error)]


def explain_fields(error: ValidationError) -> list[str]:
    """A line for each error, with its field."""
    return [f"{render_path(error.path)}: {error.message}" for error in find_errors(error)]


def refuse_options(lines: list[str]) -> UsageError:
    """The error for options that make the spec invalid."""
    if len(lines) == 1:
        return UsageError(lines[0])
    what = f"the command line has {name_errors(len(lines))}; nothing was started"
    return UsageError(what, evidence=shorten(lines))


def _place(detail: ErrorDetails) -> tuple[Path, bool]:
    """The path of an error, and whether the key is wrong rather than the value."""
    path = tuple(part for part in detail["loc"] if part not in (ONE, MANY, PODS))
    if detail["type"] == "extra_forbidden":
        return path, True
    if path[-1:] == ("[key]",):  # pydantic's mark for a key of a dict
        return path[:-1], True
    return path, False


_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a whole number that fits in 64 bits",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number of seconds",
    "float_type": "expected a number of seconds",
    "finite_number": "expected a finite number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "string_too_long": "expected fewer characters",
    "list_type": "expected a list like",
    "dict_type": "expected fields like",
    "model_type": "expected fields like",
    "model_attributes_type": "expected fields like",
}


_EXAMPLES = {
    "nodes": "[{host: gpu-a}, {host: gpu-b}]",
    "from": "{command: [./list_nodes]}",
    "known": "[{host: gpu-a}, {host: gpu-b}]",
    "addresses": "[10.0.0.11, 10.1.0.11]",
    "ssh": "{user: alice}",
    "sync": "{to: ~/project}",
    "exclude": "['*.tfrecord']",
    "on": "[task-killed, node-lost]",
    "tasks": "{worker: 2}",
    "gpus": "[0, 1]",
    "env": "{NCCL_DEBUG: WARN}",
    "env_from": "[WANDB_API_KEY]",
    "program": "{script: train.py}",
    "command": "[./train, --epochs, 3]",
    "args": "[--epochs, 3]",
    "keras": "{patch: false}",
    "restart": "{max_restarts: 0}",
    "timeouts": "{start_s: 600}",
    "notify": "{webhook_from: SLACK_WEBHOOK}",
    "volumes": "{checkpoints: /checkpoints}",
}
"""Examples for fields that are not single values."""


_SECRET: tuple[Path, ...] = (("notify",), ("notify", "webhook"))
"""Fields whose value may be the URL of a webhook, which is never shown."""


def _explain(detail: ErrorDetails, path: Path, *, is_key: bool) -> str:
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    shown = "text" if path in _SECRET and isinstance(given, str) else _show(given)
    if kind == "extra_forbidden":
        return f"unknown field{_suggest(str(path[-1]), _known_fields(path[:-1], is_of_pods=PODS in detail['loc']))}"
    if kind == "literal_error" and is_key:
        return f"unknown task type{_suggest(str(path[-1]), TASK_TYPES)}"
    if kind == "literal_error":
        field = next(str(part) for part in reversed(path) if isinstance(part, str))
        choices = tuple(re.findall(r"'([^']+)'", context["expected"]))
        if isinstance(given, (dict, list)):
            return f"expected one of {', '.join(choices)}, got {shown}"
        what = {"restart": "failure", "notify": "event"}[str(path[0])] if field == "on" else field
        return f"unknown {what} {shown}{_suggest(str(given), choices)}"
    if kind == "string_pattern_mismatch":
        return _explain_pattern(path, given, is_key=is_key)
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = "at least" if kind == "greater_than_equal" else "at most"
        return f"expected {bound} {context['ge' if bound == 'at least' else 'le']:g}, got {shown}"
    if kind == "at_most":
        return f"expected at most {context['limit']}, got {shown}: {context['reason']}"
    if kind == "too_short":
        return f"is empty; name at least one{'' if path == ('nodes',) else ', or remove the field'}"
    if path == ("preload",) and kind in _EXPECTED:
        return f"expected true, false or a list of modules like `[numpy]`, got {shown}"
    if kind in _EXPECTED:
        example = ""
        if _EXPECTED[kind].endswith("like"):
            example = f" `{'{host: gpu-a}' if isinstance(path[-1], int) else _EXAMPLES[str(path[-1])]}`"
        return f"{_EXPECTED[kind]}{example}, got {shown}"
    message = detail["msg"]
    return message[:1].lower() + message[1:]


def _explain_pattern(path: Path, given: str, *, is_key: bool) -> str:
    shown = _show(given)
    if "\0" in given:
        return "a null character cannot be passed to a program; remove it"
    if (is_key and "volumes" not in path) or path[0] == "env_from" or path[-1] == "webhook_from":
        return f"{shown} is not a valid variable name; use letters, digits and _"
    if path == ("notify", "webhook"):
        return "is not the URL of a web server; write one like `https://host/path`, without spaces"
    if not given:
        return "is empty; fill it in" + ("" if path[-1] == "host" else ", or remove the field")
    if path == ("name",):
        return f"{shown} is not a valid name; use up to 63 letters, digits, `-`, `_` and `.`, a letter or digit first"
    if path[0] == "preload":
        return f"{shown} is not a valid module name; write it as for `import`, like `numpy` or `my_package.data`"
    if "gpus" in path:
        return f"{shown} is not a GPU; write numbers or UUIDs, one for each GPU, like [0, 1]"
    if path == ("checkpoint_directory",):
        return f"{shown} is not absolute; write a path that begins with `/`, the same on all nodes"
    if path == ("cache",):
        return f"{shown} is not absolute, or contains spaces or quotes; write a path like `~/.cache/compiled`"
    if path[-1] in ("cpus", "memory"):
        return f"{shown} is not a valid amount; write it as in Kubernetes, like `4`, `500m` or `16Gi`"
    if path[:2] == ("nodes", "volumes") and not is_key:
        return f"{shown} is not absolute; write the path of the mounted claim in the pods, like `/checkpoints`"
    if path[-1] in ("namespace", "queue", "priority_class") or path[:2] == ("nodes", "volumes"):
        return f"{shown} is not a valid name in Kubernetes; use lower-case letters, digits, `-` and `.`"
    if path[-1] == "gpu_resource":
        return f"{shown} is not a valid resource name; write it like `nvidia.com/gpu`"
    if path[-1] in ("user", "proxy_jump", "hostname"):
        return f"{_show(hide_login(given))} is not a valid `{path[-1]}`; write it as for `ssh`"
    if has_control(given) and path[-1] != "host":
        return f"{shown} has a line break or another control character; remove it"
    return f"{shown} is not a host name or address; write it without a scheme, spaces or a path"


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "fields" if isinstance(value, dict) else "a list"
    if value == "":
        return "nothing"
    text = repr(hide_text(value if isinstance(value, str) else str(value)))
    return text if len(text) <= 60 else f"{text[:57]}…'"


_RENAMED = {"way": "connection"}
"""Present names of fields that earlier versions had."""


def _suggest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name[:80].lower(), known, n=1, cutoff=0.6)
    if (renamed := _RENAMED.get(name)) in known or close:
        return f"; did you mean `{renamed or close[0]}`?"
    return f"; known: {', '.join(known)}"


def _known_fields(path: Path, *, is_of_pods: bool) -> tuple[str, ...]:
    model: type[BaseModel] = ClusterSpec
    if path == ("nodes",):
        model = PodNodesSpec if is_of_pods else ListedNodesSpec
    elif path == ("nodes", "from"):
        model = NodeSourceSpec
    elif path[:1] == ("nodes",):
        model = NodeSpec
    elif path:
        kind = ClusterSpec.model_fields[str(path[0])].annotation
        kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, BaseModel)]
        model = kinds[0] if kinds else ProgramSpec
    return tuple(field.alias or name for name, field in model.model_fields.items())
