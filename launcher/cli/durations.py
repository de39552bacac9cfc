"""Durations as they are typed: `30d`, `12h`, `1h30m`, `90s`."""

from __future__ import annotations

import re

import click

UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
"""Seconds of each unit, longest first."""

_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-z])", re.ASCII)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A duration, in seconds: numbers, each with a different unit, the longest first."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):  # a default, which click converts as well
            return float(value)
        try:
            return parse_duration(value)
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
        raise ValueError(f"{text!r} is not a duration such as 30d, 12h, 1h30m or 90s")
    return sum(float(number) * UNITS[unit] for number, unit in parts)
