"""What all parts of a report have in common: frozen, fully documented in its JSON Schema, safe for a terminal."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from launcher.printable import printable


class Result(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _escape(cls, value: Any) -> Any:
        """Much is the words of others: nothing that a terminal obeys comes in, nor what JSON cannot have."""
        if isinstance(value, list):
            return [cls._escape(item) for item in value]
        if isinstance(value, dict):
            return {cls._escape(key): cls._escape(item) for key, item in value.items()}
        return printable(value) if isinstance(value, str) else value
