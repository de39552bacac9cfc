"""YAML with comments, which PyYAML does not write: a key may have a comment, on the lines above it."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from yaml.emitter import ScalarAnalysis

WIDTH = 120
_COMMENT_WIDTH = 100


class Key(str):
    """The key of a mapping, with a comment; it equals the plain key."""

    __slots__ = ("comment",)

    comment: str


def noted(key: str, comment: str) -> Key:
    """The key with a comment."""
    made = Key(key)
    made.comment = comment
    return made


def note(values: Mapping[str, Any], comments: Mapping[str, str]) -> dict[str, Any]:
    """The same mapping, with comments on these keys; ignores comments on keys that are missing."""
    return {noted(key, comments[key]) if key in comments else key: value for key, value in values.items()}


def render_documents(documents: Iterable[Mapping[str, Any]], header: str) -> str:
    """The documents in one file.

    Args:
        documents: made of texts, numbers, bytes, lists and mappings; written in this order.
        header: lines for its beginning; they become a comment.
    """
    top = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    texts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH) for document in documents
    ]
    return "---\n".join([top, *texts])


class _Base64(str):
    """Lines of base64."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    """Writes a key's comment where the key begins: the line is still empty there, but for its indentation.

    It writes base64 line by line. PyYAML would examine each character twice, which takes 0.1 s for one of our archives.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # items of a list are indented further than its key

    def write_plain(self, text: str, split: bool = True) -> None:
        if isinstance(text, Key):
            inner, self.indent = self.indent, self.indents[-1]  # a key is indented like the lines around it
            for line in textwrap.wrap(text.comment, _COMMENT_WIDTH):
                self.write_indicator(f"# {line}", need_whitespace=False)
                self.write_indent()
            self.indent = inner
        super().write_plain(text, split)

    def analyze_scalar(self, scalar: str) -> ScalarAnalysis:
        if not isinstance(scalar, _Base64):
            return super().analyze_scalar(scalar)
        analysis = super().analyze_scalar(scalar[:_COMMENT_WIDTH])
        analysis.scalar, analysis.multiline = scalar, True
        return analysis

    def write_literal(self, text: str) -> None:
        if not isinstance(text, _Base64):
            super().write_literal(text)
            return
        self.write_indicator("|", need_whitespace=True)
        self.write_line_break()
        for line in text.splitlines():
            self.write_indent()
            self.stream.write(line)
            self.write_line_break()


_Dumper.add_representer(Key, lambda dumper, key: dumper.represent_scalar("tag:yaml.org,2002:str", key))
_Dumper.add_representer(
    bytes, lambda dumper, data: dumper.represent_scalar("tag:yaml.org,2002:str", _encode(data), style="|")
)


def _encode(data: bytes) -> _Base64:
    """The bytes as base64 text, in which Kubernetes ignores line breaks; YAML itself would tag the bytes."""
    text = base64.b64encode(data).decode()
    return _Base64(
        "".join(f"{text[start : start + _COMMENT_WIDTH]}\n" for start in range(0, len(text), _COMMENT_WIDTH))
    )
