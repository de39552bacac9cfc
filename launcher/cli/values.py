"""The kinds of values that options take; an error says what was expected, and what was given."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click

from launcher.cli.usage_errors import refuse_choice

UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
"""Seconds of each unit, longest first."""

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-z])", re.ASCII)


class Whole(click.IntRange):
    """A whole number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            converted: int = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(
                f"expected a whole number{_render_range(self.min, self.max)}, not {shlex.quote(str(value))}", param, ctx
            )
        return converted


class Number(click.FloatRange):
    """A number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            converted: float = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(
                f"expected a number{_render_range(self.min, self.max)}, not {shlex.quote(str(value))}", param, ctx
            )
        return converted


class OneOf(click.Choice):  # type: ignore[type-arg]  # generic in new versions of click only
    """One of several words."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            converted: str = super().convert(value, param, ctx)
        except click.BadParameter:
            raise refuse_choice(str(value), [*map(str, self.choices)], param, ctx) from None
        return converted


class Words(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Text of an option that can be repeated; in a variable, the texts are separated and quoted as in a shell."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def split_envvar_value(self, rv: str) -> list[str]:
        return shlex.split(rv)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A duration, in seconds: numbers, each with a different unit, the longest first.

    `bare`: what `true` means, in a variable or in the file of defaults, for an option that needs no value.
    """

    name = "duration"

    def __init__(self, bare: str = "") -> None:
        self._bare = bare

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):  # a default, which click converts as well
            return float(value)
        try:
            return parse_duration(self._bare if self._bare and value == "true" else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_duration(text: str) -> float:
    """The seconds of `1h30m`.

    A number without a unit is refused: `--older-than 30` could be meant as days.

    Raises:
        ValueError: the text is not a duration.
    """
    parts = _PART.findall(text)
    order = [unit for _, unit in parts]
    known = [unit for unit in UNITS if unit in order]  # each at most once, in this order
    if not parts or order != known or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"expected a duration such as 30d, 12h, 1h30m or 90s, not {shlex.quote(text)}")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def _render_range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most:g}"
    return f" of at least {least:g}" if most is None else f" from {least:g} to {most:g}"
