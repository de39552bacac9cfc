"""The base class of all parts of a report: frozen, documented in the JSON Schema, safe to print on a terminal."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from launcher.described import describe
from launcher.printable import printable

_Self = TypeVar("_Self", bound="Result")


class Result(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=describe, defer_build=True)

    @classmethod
    def read(cls: type[_Self], facts: Any) -> _Self:
        """A part that another version of distlaunch may have written: fields that only it knows are ignored.

        Raises:
            ValidationError: a field that this version needs is missing, or has another type.
        """
        try:
            return cls.model_validate(facts)
        except ValidationError as error:
            unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
            if len(unknown) < error.error_count():
                raise
        return cls.model_validate(_without(facts, unknown))

    @field_validator("*", mode="before")
    @classmethod
    def _escape(cls, value: Any) -> Any:
        """Replaces control characters and text that JSON cannot hold: much of the text comes from outside sources."""
        if isinstance(value, list):
            return [cls._escape(item) for item in value]
        if isinstance(value, dict):
            return {cls._escape(key): cls._escape(item) for key, item in value.items()}
        return printable(value) if isinstance(value, str) else value


def _without(facts: Any, unknown: Collection[tuple[int | str, ...]]) -> Any:
    """The facts without the values at these places, which are the keys that lead there."""
    last = {place[0] for place in unknown if len(place) == 1}
    inner = {key: [place[1:] for place in unknown if place[0] == key] for key, *more in unknown if more}
    if isinstance(facts, list):
        return [_without(value, inner[key]) if key in inner else value for key, value in enumerate(facts)]
    if not isinstance(facts, dict):  # a union adds the name of its member to the place
        return facts
    return {
        key: _without(value, inner[key]) if key in inner else value for key, value in facts.items() if key not in last
    }
