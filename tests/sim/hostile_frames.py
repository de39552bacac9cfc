"""Frames of a broken or hostile sender: drawn from the messages' own types, some of them then spoiled."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.field_limits import Items, Matches, OfAttempt, OfSender, Within
from worker_entry.protocol.framing import hints
from worker_entry.protocol.messages import Log
from worker_entry.protocol.orders import Input, Piece

TEXTS = (
    "",
    "x",
    "worker:0",
    "train.py:3",
    "\0",
    "caf\udce9",
    "\ud83d",
    "\x1b[2J\x1b]52;c;aGk=\x07",
    "\u202egpj.exe",
    "\x9b2J",
    "a\nb\r\nc\u2028d",
    "../../../etc/passwd",
    "/tmp",
    "{ports}",
    "%s%n{0}{x!r}",
    "UnavailableError: Socket closed",
    "SystemExit",
    "in user code:\n  Traceback (most recent call last):\nX: y",
    'Current thread 0x00 (most recent call first):\n  File "a.py", line 99999999999999999999 in f\n',
    'Thread 0x1 (most recent call first):\n  File "\x1b[A", line 3 in \u202e\n',
    "2.21.0",
    "fe80::1%eth0",
    "::1",
    "refused",
)
LONG = ("☃" * 3000, "x" * 9000, 'Thread 0x1 (most recent call first):\n  File "\x1b[A", line 3 in \u202e\n' * 300)
NUMBERS = (0, 1, 2, 41, 42, 143, 255, 1 << 31, 1 << 53, -1, 1 << 63, 1 << 64, 10**30)
TIMES = (0.0, 1.0, 1.8e9, -1.0, 9e14, -9e14, 1e-300)
REFERENCES = (
    "task-failed",
    "preempted",
    "agent-gone",
    "taken-over",
    "no-program",
    "port-taken",
    "protocol-error",
    "disk-full",
)
WORDS = (*REFERENCES, "auto", "required", "off", "10.0.0.0/24", "fd00::/8", "192.0.2.1")
"""Texts for fields with a syntax."""
JSON: tuple[Any, ...] = (None, True, 0, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, 1e308, 10**400, "\ud800", [[[[]]]])


class RandomFrames:
    """Draws frames of these types. A frame is spoiled with probability `spoiled`; most other frames hold odd values."""

    def __init__(self, chance: random.Random, types: Sequence[type[Any]], tasks: Sequence[str], spoiled: float) -> None:
        self.attempt = 1
        self._random = chance
        self._types = types
        self._tasks = tasks
        self._spoiled = spoiled

    def draw(self, change: Callable[[dict[str, Any]], None] = lambda _: None) -> bytes:
        """One frame; `change` may still change its header."""
        kind = self._random.choice(self._types)
        header = {"type": kind.__name__, **self._fields(kind)}
        body = b""
        if kind in (FileRead, Input, Log, Piece):
            body = self._random.randbytes(self._random.choice((0, 1, 20, 300)))
            header["length"] = len(body)
        change(header)
        if self._random.random() < self._spoiled:
            return self._spoil(header, body)
        return json.dumps(header).encode() + b"\n" + body

    def _spoil(self, header: dict[str, Any], body: bytes) -> bytes:
        """A frame that contradicts its type, or bytes that are no frame."""
        pick = self._random.randrange(8)
        if pick < 4:
            spot: Any = header
            while True:  # descends to a random place in the header
                name = self._random.choice([*spot] if isinstance(spot, dict) else range(len(spot)))
                if not (isinstance(spot[name], (dict, list)) and spot[name]) or self._random.random() < 0.3:
                    break
                spot = spot[name]
            spot[name] = self._random.choice((*JSON, *NUMBERS, *TEXTS))
        elif pick == 4:
            header.pop(self._random.choice([*header]))
        elif pick == 5:
            header[self._random.choice(TEXTS)] = self._random.choice(JSON)
        data = bytearray(json.dumps(header).encode() + b"\n" + body)
        if pick >= 6:
            for _ in range(self._random.randint(1, 8)):
                place = self._random.randrange(len(data))
                if self._random.random() < 0.5:
                    data[place] = self._random.randrange(256)
                else:
                    del data[place : place + self._random.randint(1, 30)]
                if not data:
                    break
        return bytes(data)

    def _fields(self, kind: Any) -> dict[str, Any]:
        optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
        return {
            name: self._value(hint)
            for name, hint in hints(kind).items()
            if name not in optional or self._random.random() < 0.8
        }

    def _value(self, kind: Any, limits: tuple[Any, ...] = ()) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._value(kind.__origin__, kind.__metadata__)
        if origin is Union:
            return None if self._random.random() < 0.3 else self._value(arguments[0])
        if origin in (list, dict):
            most = next((limit.most for limit in limits if isinstance(limit, Items)), 8)
            count = min(self._random.choice((0, 0, 1, 1, 2, 3, 8)), most)
            if origin is list:
                return [self._value(arguments[0]) for _ in range(count)]
            return {str(self._value(arguments[0])): self._value(arguments[1]) for _ in range(count)}
        if dataclasses.is_dataclass(kind):
            fields = self._fields(kind)
            if {"code", "signal"} <= fields.keys():  # how a process ended
                fields[self._random.choice(("code", "signal"))] = None
            return fields
        return self._simple(kind, limits)

    def _simple(self, kind: Any, limits: tuple[Any, ...]) -> Any:
        if kind is bool:
            return self._random.random() < 0.5
        if kind is float:
            within = next((limit for limit in limits if isinstance(limit, Within)), Within(-(10**15), 10**15))
            return self._random.choice([time for time in TIMES if within.least <= time <= within.most])
        if kind is int:
            if any(isinstance(limit, OfAttempt) for limit in limits):
                return self.attempt
            within = next((limit for limit in limits if isinstance(limit, Within)), Within(0, 100))
            return self._random.choice([number for number in NUMBERS if within.least <= number <= within.most])
        patterns = [limit.pattern for limit in limits if isinstance(limit, Matches)]
        if any("worker" in pattern for pattern in patterns):
            return self._random.choice(self._tasks)
        if patterns or any(isinstance(limit, OfSender) for limit in limits):
            words = [word for word in WORDS if all(re.fullmatch(each, word) for each in patterns)]
            return self._random.choice(words or TEXTS)
        return self._random.choice(TEXTS if self._random.random() < 0.99 else LONG)
