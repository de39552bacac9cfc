"""The base class of all parts of a report: frozen, documented in the JSON Schema, safe to print on a terminal."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from launcher.described import describe
from launcher.printable import printable


class Result(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=describe, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _escape(cls, value: Any) -> Any:
        """Replaces control characters and text that JSON cannot hold: much of the text comes from outside sources."""
        if isinstance(value, list):
            return [cls._escape(item) for item in value]
        if isinstance(value, dict):
            return {cls._escape(key): cls._escape(item) for key, item in value.items()}
        return printable(value) if isinstance(value, str) else value
