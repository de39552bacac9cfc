"""Turns messages into frames and bytes into messages: the wire format between controller and agent.

An agent first writes `MARKER`, so that the controller can skip the output of a shell's start-up files. Then both sides
send frames: a header, which is one line of JSON, followed by exactly `length` raw bytes if the header has that key.
Log bytes travel raw, never inside JSON.

Each message is a frozen dataclass; its class name is the frame's `type`. Neither side trusts the other: invalid input
raises `ProtocolError`, which says what is wrong. An unknown *field* is an error, too: both sides always have the same
version, because the controller installs the agent. Each field declares its limits (`field_limits`), and each type the
maximum length of its header; the type comes first, so that an over-long header is refused before it is buffered.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Optional, Union, get_args, get_origin, get_type_hints

from worker_entry.protocol.costs import COSTS, FRAME_LIMIT, cost_of
from worker_entry.protocol.field_limits import FLOAT_LIMIT, LARGEST, Limit
from worker_entry.protocol.frozen import fields_of, is_frozen, required
from worker_entry.protocol.messages import Message, ToController
from worker_entry.protocol.orders import ToAgent

MARKER = b"\x1edistlaunch agent\x1e\n"

HEADER_LIMIT = max(cost.header for cost in COSTS.values())
"""Maximum length of any header in bytes."""
_BEGINNING = re.compile(rb'\{"type": ?"([A-Za-z]{1,32})"')
_BEGINNING_LENGTH = 48
SMALL_PART = 4 << 10
"""Smaller parts of a body are joined as they arrive, because each separate part costs extra memory."""

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in (*get_args(ToAgent), *get_args(ToController))}


class ProtocolError(Exception):
    """The other side sent an invalid frame: it is broken, has another version, or is another program."""


def encode(message: Message, body: bytes = b"") -> bytes:
    """Returns the frame's bytes; a message with a `length` has a `body` of that length."""
    header = {"type": type(message).__name__, **fields_of(message)}
    # ASCII: a user's string then causes neither a line break nor an encoding error.
    return json.dumps(header, separators=(",", ":"), default=fields_of).encode("ascii") + b"\n" + body


class Decoder:
    """Turns a stream of bytes, in pieces of any size, into messages with their bodies.

    Args:
        kinds: the accepted messages, as a union of types.
    """

    def __init__(self, kinds: Any = Message) -> None:
        self._kinds = {cls.__name__: cls for cls in get_args(kinds)}
        self._data = b""
        self._place = 0
        """The end of the decoded part of `_data`."""
        self._header = bytearray()
        self._pending: Optional[Message] = None
        self._body: list[bytes] = []
        """The parts of the pending message's body; joined once, because most of the traffic is log bytes."""
        self._missing = 0
        """The number of bytes of this body that have not arrived."""

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Yields the complete messages.

        Raises:
            ProtocolError: the bytes are not a valid frame; the stream is unusable from then on.
        """
        self._data, self._place = self._data[self._place :] + data, 0
        while True:
            if self._pending is None and not self._take_header():
                return
            if not self._take_body():
                return
            message, body = self._pending, b"".join(self._body)
            assert message is not None
            self._pending, self._body = None, []
            yield message, body

    def _take_header(self) -> bool:
        end = self._data.find(b"\n", self._place)
        self._header += self._data[self._place : end if end >= 0 else None]
        self._place = end + 1 if end >= 0 else len(self._data)
        if len(self._header) > FRAME_LIMIT:
            self._refuse_long(len(self._header))
        if end < 0:
            return False
        line = bytes(self._header)
        self._header.clear()
        self._pending = _parse_message(line, self._kinds)
        self._missing = getattr(self._pending, "length", 0)
        return True

    def _take_body(self) -> bool:
        part = self._data[self._place : self._place + self._missing]
        self._place += len(part)
        self._missing -= len(part)
        if self._body and len(self._body[-1]) + len(part) <= SMALL_PART:
            self._body[-1] += part
        elif part:
            self._body.append(part)
        return not self._missing

    def _refuse_long(self, length: int) -> None:
        """Raises ProtocolError if the header is too long for its type."""
        begins = _BEGINNING.match(self._header, 0, _BEGINNING_LENGTH)
        kind = self._kinds.get(begins[1].decode()) if begins is not None else None
        limit = cost_of(kind).header if kind is not None else FRAME_LIMIT
        if length > limit:
            what = kind.__name__ if kind is not None else "unknown type"
            raise ProtocolError(f"a header of more than {limit} bytes ({what})")


def _parse_message(line: bytes, kinds: dict[str, type[Any]]) -> Message:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not a header: {line[:80]!r}") from None
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise ProtocolError(f"a header without a type: {line[:80]!r}")
    name = header.pop("type")
    cls = kinds.get(name)
    if cls is None:
        raise ProtocolError(f"{'unexpected' if name in _TYPES else 'unknown'} frame type {name[:80]!r}")
    message: Message = parse(cls, header, name)
    return message


def parse(kind: Any, value: Any, where: str) -> Any:
    """Converts a JSON value to the type `kind` and checks its limits; objects become dataclasses.

    Raises:
        ProtocolError: the value is invalid; the message names the invalid part by a path that begins with `where`.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _limited(kind, parse(arguments[0], value, where), where)
    if origin is Union:  # Optional is the only union that messages use
        return None if value is None else parse(arguments[0], value, where)
    if is_frozen(kind) and isinstance(value, dict):
        return _dataclass(kind, value, where)
    if origin is list and isinstance(value, list):
        return [parse(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        places = ((key, item, f"{where}[{key[:80]!r}]") for key, item in value.items())
        return {parse(arguments[0], key, place): parse(arguments[1], item, place) for key, item, place in places}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -FLOAT_LIMIT < value < FLOAT_LIMIT:  # also refuses NaN: a NaN deadline would never pass
            raise ProtocolError(f"{where}: {value!r:.80} is out of range")
        return float(value)
    # isinstance accepts a bool as an int; the protocol does not.
    if origin is None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        if kind is int and not -LARGEST <= value <= 1 << 63:
            raise ProtocolError(f"{where}: a number of {value.bit_length()} bits is out of range")
        return value
    raise ProtocolError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}")


def _limited(kind: Any, value: Any, where: str) -> Any:
    for limit in kind.__metadata__:
        assert isinstance(limit, Limit)
        try:
            value = limit.take(value)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from None
    return value


def hints(cls: Any) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, with their limits."""
    return _hints(cls)


_hints: Callable[[Any], dict[str, Any]] = functools.cache(  # get_type_hints evaluates every annotation again
    functools.partial(get_type_hints, include_extras=True)
)


def _dataclass(cls: Any, values: dict[str, Any], where: str) -> Any:
    kinds = hints(cls)
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise ProtocolError(f"{where}: unknown field {unknown[0][:80]!r}")
    missing = sorted(required(cls) - set(values))
    if missing:
        raise ProtocolError(f"{where}: field {missing[0]!r} is missing")
    return cls(**{name: parse(kinds[name], value, f"{where}.{name}") for name, value in values.items()})


def marked(kind: Any, value: Any, mark: Any) -> Iterator[Any]:
    """Yields the values in a message, or in a part of a message, whose annotation has a mark of this class."""
    if value is None or not _has(kind, mark):
        return
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and any(isinstance(limit, mark) for limit in kind.__metadata__):
        yield value
    elif origin in (Annotated, Union):
        yield from marked(arguments[0], value, mark)
    elif origin is list:
        for item in value:
            yield from marked(arguments[0], item, mark)
    elif origin is dict:
        for key, item in value.items():
            yield from marked(arguments[0], key, mark)
            yield from marked(arguments[1], item, mark)
    else:
        for name, inner in hints(kind).items():
            yield from marked(inner, getattr(value, name), mark)


@functools.cache
def _has(kind: Any, mark: Any) -> bool:
    if get_origin(kind) is Annotated and any(isinstance(limit, mark) for limit in kind.__metadata__):
        return True
    inner: Any = hints(kind).values() if is_frozen(kind) else get_args(kind)
    return any(_has(part, mark) for part in inner if not isinstance(part, Limit))
