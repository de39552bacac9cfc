"""Durations on the command line: a number without a unit is refused."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.values import UNITS, Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 2_592_000),
        ("12h", 43_200),
        ("10m", 600),
        ("90s", 90),
        ("2w", 1_209_600),
        ("1h30m", 5_400),
        ("0.5h", 1_800),
    ],
)
def test_a_duration_is_the_sum_of_its_parts(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "d", "30 d", "-1d", "1m1h", "1h1h", "1y", "1D", "1e3s", "nan", "٣d", "1h\n", "9" * 400 + "d"]
)
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as 30d, 12h, 1h30m or 90s, not "):
        parse_duration(text)


@given(st.dictionaries(st.sampled_from([*UNITS]), st.integers(0, 999_999_999), min_size=1))
def test_a_duration_may_combine_any_units_in_descending_order(numbers: dict[str, int]) -> None:
    parts = [(numbers[unit], unit) for unit in UNITS if unit in numbers]
    assert parse_duration("".join(f"{number}{unit}" for number, unit in parts)) == sum(n * UNITS[u] for n, u in parts)


def test_an_option_reports_an_invalid_duration_as_a_usage_error() -> None:
    command = click.Command("x", params=[click.Option(["--since"], type=Duration(), default="1h")])

    assert command.make_context("x", []).params == {"since": 3600.0}
    with pytest.raises(click.BadParameter, match="expected a duration such as 30d, 12h, 1h30m or 90s, not soon"):
        command.make_context("x", ["--since", "soon"])
