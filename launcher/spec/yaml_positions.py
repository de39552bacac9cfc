"""Parses YAML into plain values, and records the position of each value in the file.

Scalars stay the text in the file, which avoids YAML's guesses (`no` is false, `1:30` is ninety). Merge keys (`<<`) and
tags are errors.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, NamedTuple

import yaml

from launcher.spec.contradictions import Path, render_path
from launcher.wording import shorten
from worker_entry.protocol.frozen import dataclass

SIZE_LIMIT = 256 << 10
"""The maximum size of a spec file, in bytes."""
FIELD_LIMIT = 80
"""The maximum length at which a field's name is shown, in characters."""
VALUES_LIMIT = 100_000
"""The maximum number of values with aliases expanded; a few lines of nested anchors can expand to billions."""


class Mark(NamedTuple):
    """A position in the file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class PlacedError:
    """One error in a spec file."""

    mark: Mark
    path: Path
    message: str

    def render(self, file: str) -> str:
        path = tuple(_shorten(part) if isinstance(part, str) else part for part in self.path)
        field = f" {render_path(path)}" if path else ""
        line = f"{file}:{self.mark.line}:{self.mark.column}{field}: {self.message}"
        # The file's text must not control the terminal.
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def _shorten(name: str) -> str:
    return name if len(name) <= FIELD_LIMIT else f"{name[:FIELD_LIMIT]}…"


class InvalidFileError(Exception):
    """The file has these errors."""

    def __init__(self, errors: list[PlacedError]) -> None:
        super().__init__(errors)
        self.errors = errors

    def render(self, file: str) -> list[str]:
        """The first errors in the order of the file, a line each."""
        return shorten([error.render(file) for error in sorted(self.errors, key=lambda error: error.mark)], f"{file}: ")


class Marks:
    """The positions of the file's keys and values."""

    def __init__(self) -> None:
        self.keys: dict[Path, Mark] = {}
        self.values: dict[Path, Mark] = {}

    def find(self, path: Path, *, key: bool = False) -> Mark:
        """The position of the value (or of its key); if it is not in the file, of the innermost value around it."""
        if key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return Mark(1, 1)


def parse_yaml(data: bytes, *, empty: Any = None) -> tuple[Any, Marks, list[PlacedError]]:
    """Returns the file's values as dicts, lists and text, their positions, and errors that do not hide others.

    Args:
        data: the file.
        empty: the values of an empty file; None: it is an error.

    Raises:
        InvalidFileError: because of an error, the rest of the file cannot be read.
    """
    if len(data) > SIZE_LIMIT:
        raise _only(Mark(1, 1), f"the file is larger than {SIZE_LIMIT >> 10} KiB; is it a spec?")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        mark = _mark_at(before, len(before))
        raise _only(mark, f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8") from None
    reader = _Reader()
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        values = empty if root is None else reader.read(root, (), ())
    except yaml.MarkedYAMLError as error:
        raise InvalidFileError([_syntax_error(error)]) from None
    except yaml.reader.ReaderError as error:
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML; remove it"
        raise _only(_mark_at(text, error.position), message) from None
    except RecursionError:
        raise _only(Mark(1, 1), "the values are nested too deeply; no spec needs that") from None
    except (ValueError, OverflowError):  # PyYAML does not check the numbers in escapes and directives
        place = re.search(r"\\U(?!000|0010)|^%YAML", text, re.MULTILINE)
        message = "a number is out of range; write the character itself, or remove the %YAML line"
        raise _only(_mark_at(text, place.start() if place else 0), message) from None
    if values is None:
        raise _only(Mark(1, 1), "the file is empty; a spec needs at least `nodes: [{host: local}]`")
    return values, reader.marks, reader.errors


def _only(mark: Mark, message: str) -> InvalidFileError:
    """The error for a file that cannot be read further."""
    return InvalidFileError([PlacedError(mark, (), message)])


def _mark_at(text: str, position: int) -> Mark:
    return Mark(text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position))


_SYNTAX = (
    (r"found character '\\t'", "found a tab; indent with spaces"),
    (r"found character ('.+') that cannot start", r"a value cannot begin with \1; put it in quotes"),
    (r"another document", "a second document begins here; a spec is one document: remove the `---`"),
    (r"undefined alias '(.+)'", r"there is no anchor `&\1` above; define it, or put the value in quotes"),
    (r"mapping values are not", "unexpected `:`; indent each level the same, and quote values that contain `: `"),
    (r"sequence entries are not", "unexpected `- `; begin each item of a list on its own line"),
    (
        r"expected <block end>",
        "this does not match the lines above; indent each level the same, and write `''` for a quote in single quotes",
    ),
    (r"expected ',' or '(.)'", r"a bracket is not closed; write `,` or `\1` here"),
    (r"unexpected end of stream", "a quote is opened and never closed; close it"),
    (r"unknown escape character '(.)'", r"`\\\1` is not an escape in double quotes; write single quotes, or `\\\\\1`"),
    (r"could not find expected ':'", "expected `name: value`; write a `:` and a space after the name"),
    (r"expected alphabetic or numeric", "`*` and `&` begin the name of an anchor; put the value in quotes"),
    (r"second occurrence", "this anchor is already defined above; choose another name"),
    (r"expected the node content", "expected a value; write one, or put this in quotes"),
)
"""PyYAML's messages (as regular expressions), and ours."""


def _syntax_error(error: yaml.MarkedYAMLError) -> PlacedError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not YAML"
    if "end of stream" in problem and error.context_mark is not None:
        mark = error.context_mark  # where the quote or bracket was opened
    place = Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)
    for pattern, message in _SYNTAX:
        match = re.search(pattern, problem)
        if match is not None:
            return PlacedError(place, (), match.expand(message))
    return PlacedError(place, (), f"not YAML: {problem}{f' ({error.context})' if error.context else ''}")


_PLAIN_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Reader:
    """Turns YAML's nodes into dicts, lists and text."""

    def __init__(self) -> None:
        self.marks = Marks()
        self.errors: list[PlacedError] = []
        self._count = 0

    def read(self, node: yaml.Node, path: Path, around: tuple[yaml.Node, ...]) -> Any:
        mark = _mark(node)
        self.marks.values[path] = mark
        self._count += 1
        if node in around:  # a node is equal only to itself
            raise InvalidFileError([PlacedError(mark, path, "the anchor contains itself; write the value out")])
        if self._count > VALUES_LIMIT:
            message = f"more than {VALUES_LIMIT} values with aliases (*name) expanded; use fewer aliases"
            raise InvalidFileError([PlacedError(mark, path, message)])
        if node.tag not in _PLAIN_TAGS:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.errors.append(PlacedError(mark, path, f"the tag {shown} has no meaning in a spec; remove it"))
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path, (*around, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, i), (*around, node)) for i, child in enumerate(node.value)]
        return self._read_text(node, path)

    def _read_text(self, node: yaml.Node, path: Path) -> str:
        text: str = node.value
        if not _SURROGATE.search(text):
            return text
        try:  # JSON writes a character beyond U+FFFF as two escapes
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            message = r"an escape like \ud800 is half a character; write the character itself"
            self.errors.append(PlacedError(_mark(node), path, message))
            return _SURROGATE.sub("x", text)

    def _read_mapping(self, node: yaml.Node, path: Path, around: tuple[yaml.Node, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.errors.append(PlacedError(mark, path, "a field's name must be a word; write `name: value`"))
                continue
            key = self._read_text(key_node, path)
            child = (*path, key)
            if key in values:
                first = self.marks.keys[child].line
                self.errors.append(PlacedError(mark, child, f"is given twice, first on line {first}; remove one"))
                continue
            if key == "<<":
                message = "merge keys are not supported; write the fields out, or use an alias for a whole value"
                self.errors.append(PlacedError(mark, child, message))
                continue
            self.marks.keys[child] = mark
            values[key] = self.read(value_node, child, around)
        return values


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)
