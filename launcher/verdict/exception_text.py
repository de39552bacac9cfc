"""Finds the one sentence of an exception's message that says what went wrong.

TensorFlow puts this sentence below the traceback of the graph's construction, Keras between a heading and a list of
arguments, and AutoGraph below the frames of the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.printable import printable
from worker_entry.protocol.collateral import without_wrappers

LENGTH = 300
"""The maximum length of a sentence, in characters."""
NODE_LENGTH = 60
"""The maximum length of a node's name, in characters; a longer name is reduced to its first and last part."""

_TRACEBACK = "Traceback (most recent call last):\n"
_IN_USER_CODE = re.compile(r"in user code:\n\n(?: {4}File .*\n {8}.*\n)+\n")
_IN_CALL = re.compile(r"Exception encountered when calling (.+)\.\n\n")
_GRAPH_ERROR = "Graph execution error:"
_TRACE_LINE = re.compile(r"Detected at node |<stack traces unavailable>|Node: '|File \".*\", line \d+")
"""The lines between `_GRAPH_ERROR` and the sentence, without their indentation."""
_ROOT = re.compile(r"^ +\(\d+\) ([A-Z_]+): +", re.MULTILINE)
_NODE = re.compile(r"\[\[\{\{node ([^}]+)\}\}\]\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = re.compile(
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+: "
    r"|(?:Collective ops is aborted by: )+"
    r"|\[_XlaMustCompile=[^\]]*\]"
    r"| *\[Op:\w+\](?: name:.*)?$"
    r"|\{\{node [^}]+\}\}$"
)
_INLINE_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_REPEATED = ("Additional GRPC error information", ":UNKNOWN:Error received from peer")
"""Lines below an error that only say how it arrived."""
_NO_PLACES = ("PyFunc", "EagerPyFunc", "IteratorGetNext")
"""Nodes that stand for the whole input pipeline."""


class _Failure(NamedTuple):
    """A graph's report of one failure, and the node that failed."""

    text: str
    node: str


def find_sentence(message: str, preferred: Sequence[str] = ()) -> str:
    """The sentence that says what went wrong; empty if the message is empty.

    Args:
        message: the exception's message.
        preferred: a line that contains one of these texts takes precedence.
    """
    text = without_wrappers(printable(_COLOURS.sub("", message)))
    _, found, inner = text.rpartition(_TRACEBACK)
    raised = [line for line in inner.splitlines() if line and not line[0].isspace()]
    if found and raised:  # the exception that the user's function raised in a tf.data pipeline
        return raised[0][:LENGTH]
    chosen = [
        line
        for line in text.splitlines()
        if any(words in line for words in preferred) and not line.startswith(_REPEATED)
    ]
    if chosen:
        return _clean(_ROOT.sub("", chosen[0]))[:LENGTH]
    in_user_code = _IN_USER_CODE.match(text)
    if in_user_code is not None:
        return find_sentence("\n".join(line.removeprefix("    ") for line in text[in_user_code.end() :].splitlines()))
    in_call = _IN_CALL.search(text)
    if in_call is not None:
        return f"{find_sentence(text[in_call.end() :])} (in {in_call[1]})"
    if text.startswith("in user code:"):
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:LENGTH]
    failure = _find_failure(text)
    sentence = _first_sentence(failure.text)[:LENGTH]
    return f"{sentence} (node {failure.node})" if failure.node else sentence


def _find_failure(text: str) -> _Failure:
    """The first failure that does not merely follow from another one in the same graph."""
    if text.startswith(_GRAPH_ERROR):
        text = _below_trace(text)
    starts = [*_ROOT.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    roots = [(start[1], text[start.end() : end]) for start, end in zip(starts, ends, strict=False)]
    roots.sort(key=lambda root: root[0] == "CANCELLED")
    chosen = roots[0][1] if roots else text
    node = _NODE.search(chosen)
    return _Failure(chosen, "") if node is None else _Failure(chosen[: node.start()], _shorten_node(node[1]))


def _shorten_node(name: str) -> str:
    parts = name.split("/")
    if re.sub(r"_\d+$", "", parts[-1]) in _NO_PLACES:
        return ""
    return name if len(name) <= NODE_LENGTH or len(parts) < 3 else f"{parts[0]}/…/{parts[-1]}"


def _below_trace(text: str) -> str:
    lines = text.splitlines()
    last = max((number for number, line in enumerate(lines) if _TRACE_LINE.match(line.lstrip())), default=0)
    indent = len(lines[last]) - len(lines[last].lstrip())
    rest = lines[last + 1 :]
    if indent and rest and rest[0].startswith(" " * (indent + 1)):  # the source of that line
        del rest[0]
    return "\n".join(rest)


def _first_sentence(text: str) -> str:
    lines = [line for line in (_clean(line.strip()) for line in text.splitlines()) if line] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def _clean(line: str) -> str:
    return _INLINE_NODE.sub(r"\1", _MARKS.sub("", _NODE.sub("", line))).strip()
