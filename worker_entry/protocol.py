"""The one contract between controller and agent: frames, their fields, and how bytes become frames.

An agent first writes `MARKER`, so that whatever a shell's start-up files print before it can be skipped. After
it come frames in both directions: a header, which is one line of JSON, followed by exactly `length` raw bytes
when the header has that key. Log bytes travel raw, never inside JSON.

Each message is a frozen dataclass; its class name is the frame's `type`. Both sides treat the other as possibly
broken: whatever does not fit raises `ProtocolError`, which says what it was. An unknown *field* is an error, too:
the two sides are always of one version, because the controller brings the agent along.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

from worker_entry.messages import Message, ToAgent, ToController

MARKER = b"\x1edistlaunch agent\x1e\n"

HEADER_LIMIT = 16 << 20
"""Bytes of a header at the most: a start order carries the environment of every task of a node."""
BODY_LIMIT = 1 << 20
"""Bytes of a body at the most; longer content is sent in pieces."""

FLOAT_LIMIT = 1e15
"""No time in seconds is as long."""

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (*get_args(ToAgent), *get_args(ToController))}


class ProtocolError(Exception):
    """The other side sent something that is no frame of this version: it is broken, or it is not ours."""


def encode(message: Message, body: bytes = b"") -> bytes:
    """The frame's bytes; `body` belongs to messages with a `length`, and has that length."""
    header = {"type": type(message).__name__, **dataclasses.asdict(message)}
    # ASCII, so that no byte of a user's string can be a line break or break an encoding.
    return json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n" + body


class Decoder:
    """Turns a stream of bytes, in pieces of any size, into messages with their bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._pending: Optional[Message] = None

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Yields what has become complete.

        Raises:
            ProtocolError: the bytes are no frame; the stream cannot be used any more.
        """
        self._buffer += data
        while True:
            if self._pending is None and not self._take_header():
                return
            message = self._pending
            assert message is not None
            length = getattr(message, "length", 0)
            if len(self._buffer) < length:
                return
            body = bytes(self._buffer[:length])
            del self._buffer[:length]
            self._pending = None
            yield message, body

    def _take_header(self) -> bool:
        end = self._buffer.find(b"\n", self._searched)
        if max(end, len(self._buffer) if end < 0 else 0) > HEADER_LIMIT:
            raise ProtocolError(f"a header of more than {HEADER_LIMIT} bytes")
        if end < 0:
            self._searched = len(self._buffer)
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        self._pending = _message(line)
        return True


def _message(line: bytes) -> Message:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not a header: {line[:80]!r}") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError(f"a header without a type: {line[:80]!r}")
    name = header.pop("type")
    cls = _TYPES.get(name)
    if cls is None:
        raise ProtocolError(f"unknown frame type {name[:80]!r}")
    message: Message = parse(cls, header, name)
    length = getattr(message, "length", 0)
    if not 0 <= length <= BODY_LIMIT:
        raise ProtocolError(f"{name}.length: {length} is not within 0 and {BODY_LIMIT}")
    return message


def parse(kind: Any, value: Any, where: str) -> Any:
    """What JSON holds as the type `kind`: objects become dataclasses.

    Raises:
        ProtocolError: it is not of that type; `where` begins the path to the wrong part.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Union:  # Optional is the only union that messages use
        return None if value is None else parse(arguments[0], value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value, where)
    if origin is list and isinstance(value, list):
        return [parse(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: parse(arguments[1], item, f"{where}[{key[:80]!r}]") for key, item in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -FLOAT_LIMIT < value < FLOAT_LIMIT:  # NaN is not, either: no deadline would ever come
            raise ProtocolError(f"{where}: {value!r:.80} is out of range")
        return float(value)
    # bool is an int to isinstance, but not to this contract.
    if origin is None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ProtocolError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}")


_hints = functools.cache(get_type_hints)  # it evaluates every annotation anew


def _dataclass(cls: Any, values: dict[str, Any], where: str) -> Any:
    hints = _hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ProtocolError(f"{where}: unknown field {unknown[0][:80]!r}")
    required = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(values))
    if missing:
        raise ProtocolError(f"{where}: field {missing[0]!r} is missing")
    return cls(**{name: parse(hints[name], value, f"{where}.{name}") for name, value in values.items()})
