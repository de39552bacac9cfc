"""The base of every part of a report: frozen, fully documented in its JSON Schema, safe for a terminal."""

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
        """Replaces what a terminal would obey or JSON cannot hold: much of the text comes from elsewhere."""
        if isinstance(value, list):
            return [cls._escape(item) for item in value]
        if isinstance(value, dict):
            return {cls._escape(key): cls._escape(item) for key, item in value.items()}
        return printable(value) if isinstance(value, str) else value
