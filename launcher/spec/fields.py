"""The types of a spec's fields; each validates its text, and describes itself in the JSON Schema."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    Tag,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from launcher.spec.redaction import Hides, hide_env, hide_words
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class AtMost:
    """The largest value of a number, and the reason, which the message appends to the limit."""

    limit: int
    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "maximum": self.limit}

    def _check(self, value: float) -> float:
        if value > self.limit:
            context = {"limit": f"{self.limit:,}", "reason": self.reason}
            raise PydanticCustomError("at_most", "expected at most {limit}: {reason}", context)
        return value


def _check_colons(name: str) -> str:
    machine = name.rpartition("@")[2]
    if ":" in machine:
        try:
            ipaddress.IPv6Address(machine[1:-1] if machine[0] + machine[-1] == "[]" else machine)
        except ValueError:
            raise PydanticCustomError(
                "host", "{name} is neither an IPv6 address nor a name; write it without a port", {"name": repr(name)}
            ) from None
    return name


Text = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00]*$"),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
FilledText = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A text that may become an argument or a line for another program: it has no control characters."""
Word = Annotated[str, StringConstraints(pattern=r"^[^\x00]+$")]
"""An argument of a program that the user has chosen."""
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Environment = Annotated[
    dict[VariableName, Text], Field(json_schema_extra={"additionalProperties": False}), Hides(hide_env)
]
Words = Annotated[list[Text], Hides(hide_words)]
"""The words of a command line."""
HostName = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9_.-]+@)?[A-Za-z0-9_.:%\[\]-]+$", max_length=255),
    AfterValidator(_check_colons),
]
Address = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.:%\[\]-]+$", max_length=255), AfterValidator(_check_colons)
]


def _check_network(value: str) -> str:
    try:
        return str(ipaddress.ip_network(value, strict=False))
    except ValueError:
        raise PydanticCustomError("network", "expected an address or a network, like 10.0.0.0/24 or fd00::/8") from None


Network = Annotated[str, StringConstraints(max_length=50), AfterValidator(_check_network)]
"""A network as text, in canonical form."""
GpuName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9/-]*$"),
    WithJsonSchema({"type": ["string", "integer"], "pattern": "^[A-Za-z0-9][A-Za-z0-9/-]*$", "minimum": 0}),
]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LIMITED_S = AtMost(31_536_000, "no run waits for more than a year")
UNLESS_0 = AtMost(31_536_000, "that is a year; 0 sets no limit")
Times = Annotated[int, Field(ge=0), AtMost(1_000_000, "a restart takes seconds, so a run with more would never end")]


@dataclass(frozen=True)
class PortRange:
    """An inclusive range of TCP ports; written `20000-20999`."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def parse_port_range(value: Any) -> PortRange:
    """Parses `20000-20999` or `20000`."""
    if isinstance(value, PortRange):
        return value
    match = re.fullmatch(r"([0-9]{1,5})(?: *- *([0-9]{1,5}))?", str(value))
    if match is None:
        raise PydanticCustomError("port_range", "expected a range of ports; write it like 20000-20999")
    ports = PortRange(int(match[1]), int(match[2] or match[1]))
    if ports.first < 1 or ports.last > 65535:
        raise PydanticCustomError("port_range", "ports go from 1 to 65535; write a range like 20000-20999")
    if ports.first > ports.last:
        raise PydanticCustomError("port_range", "the range ends before it begins; write the smaller port first")
    return ports


Ports = Annotated[
    PortRange,
    PlainValidator(parse_port_range),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {"type": ["string", "integer"], "pattern": "^[0-9]{1,5}( *- *[0-9]{1,5})?$", "examples": ["20000-20999"]}
    ),
]


@dataclass(frozen=True)
class Endpoint:
    """An address of this machine and a TCP port to listen on; written `127.0.0.1:9400`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(value: Any) -> Endpoint:
    """Parses `0.0.0.0:9400`, `[::1]:9400` or `gpu-a:9400`; `9400` and `:9400` mean the loopback address."""
    if isinstance(value, Endpoint):
        return value
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9_.-]+))?:)?([0-9]{1,5})", str(value), re.ASCII)
    if match is None:
        raise PydanticCustomError("endpoint", "expected ADDRESS:PORT; write it like 127.0.0.1:9400 or [::1]:9400")
    if not 1 <= int(match[3]) <= 65535:
        raise PydanticCustomError("endpoint", "ports go from 1 to 65535; write it like 127.0.0.1:9400")
    return Endpoint(match[1] or match[2] or "127.0.0.1", int(match[3]))


Listen = Annotated[
    Endpoint,
    PlainValidator(parse_endpoint),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["127.0.0.1:9400"]}),
]

WebAddress = Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$", max_length=8192)]
"""The URL of a web server, in ASCII."""


def parse_keepable(value: Any) -> bool | str:
    """Parses `true`, `false` or `keep`, given as text or as a value."""
    known: dict[str, bool | str] = {"true": True, "false": False, "keep": "keep"}
    if str(value).lower() not in known:
        raise PydanticCustomError("keepable", "expected true, false or keep, got {value}", {"value": repr(value)})
    return known[str(value).lower()]


Keepable = Annotated[
    bool | Literal["keep"], PlainValidator(parse_keepable), WithJsonSchema({"enum": [True, False, "keep"]})
]


def check_collected(pattern: str) -> str:
    """Returns the pattern; raises PydanticCustomError, a ValueError, if no file in a folder can match it."""
    if pattern.lstrip("!").startswith(("/", "~")) or ".." in pattern.split("/"):
        raise PydanticCustomError(
            "collected",
            "{pattern} is not in the working directory; write a path in it, like `models/`",
            {"pattern": repr(pattern)},
        )
    if not pattern.strip("!").strip() or pattern.startswith("#"):
        raise PydanticCustomError("collected", "{pattern} matches nothing", {"pattern": repr(pattern)})
    return pattern


Collected = Annotated[Text, AfterValidator(check_collected)]
"""A pattern of files in the working directory, as in .gitignore."""

_MODULE = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"
ModuleName = Annotated[str, StringConstraints(pattern=_MODULE)]
"""A Python module, as `import` names it."""


def _tag_modules(value: Any) -> str:
    return MANY if isinstance(value, (list, tuple)) else ONE


ONE, MANY, PODS = "\0one", "\0many", "\0pods"
"""Tags of a field's alternatives: a single value, a list, or pods. pydantic puts them into the paths of errors."""
Preload = Annotated[
    Annotated[bool, Tag(ONE)] | Annotated[list[ModuleName], Tag(MANY)],
    Discriminator(_tag_modules),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string", "pattern": _MODULE}}]}
    ),
]
"""`true`, `false`, or a list of modules; the tags limit pydantic's errors to the alternative that was written."""
