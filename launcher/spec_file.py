"""Reads a cluster spec from YAML; every mistake is told with its line and column, all of them at once.

Scalars are kept as the text that was written; the models' types say what they mean. That leaves out YAML's guesses
(`no` is false, `1:30` is ninety), and merge keys (`<<`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import SpecError
from launcher.spec import ClusterSpec, NodeSpec, Path, ProgramSpec, render_path
from launcher.tasks import TASK_TYPES

SIZE_LIMIT = 4 << 20
"""Bytes of a spec file."""
VALUES_LIMIT = 100_000
"""Values of a spec with its aliases expanded; a few lines of nested anchors can stand for billions."""


class Mark(NamedTuple):
    """A place in the file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a spec file."""

    mark: Mark
    path: Path
    message: str

    def render(self, file: str) -> str:
        field = f" {render_path(self.path)}" if self.path else ""
        return f"{file}:{self.mark.line}:{self.mark.column}{field}: {self.message}"


class _MistakesError(Exception):
    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(mistakes)
        self.mistakes = mistakes


def load_spec(path: FilePath, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """Reads and checks a spec file.

    Args:
        path: the file.
        environ: if given, every variable of `env_from` must be there.

    Raises:
        SpecError: the file cannot be read, or something in it is wrong.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the spec {path}: {error.strerror}", cure="check the path") from None
    try:
        return parse_spec(data, environ)
    except _MistakesError as error:
        lines = [mistake.render(str(path)) for mistake in sorted(error.mistakes, key=lambda m: m.mark)]
        count = "a mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise SpecError(f"the spec has {count}; nothing was started", evidence=lines) from None


def parse_spec(data: bytes, environ: Mapping[str, str] | None = None) -> ClusterSpec:
    """The same for the file's bytes; raises an error that `load_spec` renders."""
    values, marks = _parse_yaml(data)
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else "a single value"
        raise _MistakesError([Mistake(Mark(1, 1), (), f"expected fields like `nodes:` at the top, got {what}")])
    try:
        spec = ClusterSpec.model_validate(values)
    except ValidationError as error:
        raise _MistakesError([*_mistakes(error, values, marks)]) from None
    missing = [
        Mistake(
            marks.find(("env_from", i)),
            ("env_from", i),
            f"{name} is not set in this environment; export it first",
        )
        for i, name in enumerate(spec.env_from)
        if environ is not None and name not in environ
    ]
    if missing:
        raise _MistakesError(missing)
    return spec


# --- YAML → plain values, with the place of each ---


class _Marks:
    """Where each key and each value of the file stands."""

    def __init__(self) -> None:
        self.keys: dict[Path, Mark] = {}
        self.values: dict[Path, Mark] = {}

    def find(self, path: Path, *, key: bool = False) -> Mark:
        """The place of the value (or of its key), or of the innermost thing around it that is in the file."""
        if key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return Mark(1, 1)


def _parse_yaml(data: bytes) -> tuple[Any, _Marks]:
    if len(data) > SIZE_LIMIT:
        raise _MistakesError(
            [Mistake(Mark(1, 1), (), f"the file is larger than {SIZE_LIMIT >> 20} MiB; is it a spec?")]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise _MistakesError([Mistake(Mark(line, column), (), message)]) from None
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise _MistakesError([_syntax_mistake(error)]) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        position = getattr(error, "position", 0)
        mark = Mark(text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position))
        raise _MistakesError(
            [
                Mistake(
                    mark,
                    (),
                    f"a character that YAML does not allow: {error.reason!r}"
                    if hasattr(error, "reason")
                    else str(error),
                )
            ]
        ) from None
    except RecursionError:
        raise _MistakesError([Mistake(Mark(1, 1), (), "the values are nested too deeply")]) from None
    if root is None:
        message = "the file is empty; a spec needs at least `nodes: [{host: local}]`"
        raise _MistakesError([Mistake(Mark(1, 1), (), message)])
    reader = _Reader()
    values = reader.read(root, (), ())
    if reader.mistakes:
        raise _MistakesError(reader.mistakes)
    return values, reader.marks


def _syntax_mistake(error: yaml.MarkedYAMLError) -> Mistake:
    mark = error.problem_mark or error.context_mark
    place = Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)
    problem = error.problem or error.context or "not YAML"
    if "'\\t'" in problem:
        problem = "a tab; YAML indents with spaces only: write spaces"
    elif "expected a single document" in (error.context or ""):
        problem = "a second document begins here; a spec is one document: remove the `---`"
    elif "undefined alias" in problem:
        problem = f"{problem}; define it with & before"
    elif error.context:
        problem = f"{problem} ({error.context})"
    return Mistake(place, (), problem)


class _Reader:
    """Turns YAML's nodes into dicts, lists and text."""

    def __init__(self) -> None:
        self.marks = _Marks()
        self.mistakes: list[Mistake] = []
        self._count = 0

    def read(self, node: yaml.Node, path: Path, around: tuple[yaml.Node, ...]) -> Any:
        mark = _mark(node)
        self.marks.values[path] = mark
        self._count += 1
        if any(node is outer for outer in around):
            raise _MistakesError([Mistake(mark, path, "an anchor that contains itself; write the value out")])
        if self._count > VALUES_LIMIT:
            message = f"more than {VALUES_LIMIT} values with its aliases (*name) expanded; write less of them"
            raise _MistakesError([Mistake(mark, path, message)])
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path, (*around, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, i), (*around, node)) for i, child in enumerate(node.value)]
        return node.value

    def _read_mapping(self, node: yaml.MappingNode, path: Path, around: tuple[yaml.Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistakes.append(Mistake(mark, path, "a key has to be a word"))
                continue
            key = key_node.value
            child = (*path, key)
            if key in values:
                first = self.marks.keys[child].line
                self.mistakes.append(Mistake(mark, child, f"is given twice, first in line {first}; remove one"))
                continue
            if key == "<<":
                self.mistakes.append(
                    Mistake(mark, child, "merge keys are not supported; use an alias for a whole value")
                )
                continue
            self.marks.keys[child] = mark
            values[key] = self.read(value_node, child, around)
        return values


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


# --- pydantic's errors → mistakes with a place and a cure ---


def _mistakes(error: ValidationError, values: Any, marks: _Marks) -> Iterator[Mistake]:
    for detail in error.errors():
        if detail["type"] == "contradictions":
            for problem_path, message in detail["ctx"]["problems"]:
                is_key = bool(problem_path) and problem_path[-1] in ("ps", "chief", "evaluator")
                yield Mistake(marks.find(problem_path, key=is_key), problem_path, message)
            continue
        is_key = detail["type"] == "extra_forbidden" or detail["loc"][-1:] == ("[key]",)
        path = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing":
            yield Mistake(marks.find(path[:-1]), path, "is missing; add it")
        else:
            yield Mistake(marks.find(path, key=is_key), path, _explain(detail, path, values))


_EXPECTED = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number of seconds",
    "float_type": "expected a number of seconds",
    "finite_number": "expected a finite number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "list_type": "expected a list: write [a, b], or lines that begin with `- `",
    "dict_type": "expected fields: write {name: value}, or indented lines `name: value`",
    "model_type": "expected fields: write {name: value}, or indented lines `name: value`",
    "model_attributes_type": "expected fields: write {name: value}, or indented lines `name: value`",
    "too_short": "is empty; name at least one, or leave the field out",
}


def _explain(detail: ErrorDetails, path: Path, values: Any) -> str:
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    shown = _show(given)
    if kind == "extra_forbidden":
        return f"unknown field{_suggest(str(path[-1]), _known_fields(path[:-1]))}"
    if kind == "literal_error" and detail["loc"][-1] == "[key]":
        return f"unknown task type{_suggest(str(path[-1]), TASK_TYPES)}"
    if kind == "literal_error":
        choices = get_args(ClusterSpec.model_fields["strategy"].annotation)
        return f"unknown strategy {shown}{_suggest(str(given), choices)}"
    if kind == "string_pattern_mismatch":
        return _explain_pattern(path, shown, is_key=detail["loc"][-1] == "[key]")
    if kind in ("greater_than_equal", "less_than_equal"):
        if path[-1] == "max_restarts":
            return f"this version knows no restarts, got {shown}; write 0 or leave it out"
        bound = "at least" if kind == "greater_than_equal" else "at most"
        return f"expected {bound} {context['ge' if bound == 'at least' else 'le']:g}, got {shown}"
    if kind in _EXPECTED:
        return _EXPECTED[kind] if kind == "too_short" else f"{_EXPECTED[kind]}, got {shown}"
    message = detail["msg"]
    return message[:1].lower() + message[1:]


def _explain_pattern(path: Path, shown: str, *, is_key: bool) -> str:
    if "\\x00" in shown:
        return "a null character cannot be passed to a program; remove it"
    if is_key or path[0] == "env_from":
        return f"{shown} cannot name an environment variable; use letters, digits and _"
    if path[-1] == "name":
        return f"{shown} cannot be a name; use up to 63 letters, digits, `-`, `_` and `.`"
    return f"{shown} is no host name or address; write it without a scheme, spaces or a path"


def _show(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "fields" if isinstance(value, dict) else "a list"
    if value == "":
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…'"


def _suggest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(known)}"


def _known_fields(path: Path) -> tuple[str, ...]:
    model: type[BaseModel] = ClusterSpec
    if path[:1] == ("nodes",):
        model = NodeSpec
    elif path:
        field = ClusterSpec.model_fields[str(path[0])]
        model = field.annotation if isinstance(field.annotation, type) else ProgramSpec
    return tuple(model.model_fields)
