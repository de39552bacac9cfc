"""Colours are readable on black and on white."""

from __future__ import annotations

import pytest

from launcher.console.palette import CYAN, GREEN, ORANGE, RED, TASKS

LEVELS = (0, 95, 135, 175, 215, 255)
"""Levels of the cube of 6 × 6 × 6 colours, which begins at 16."""


def luminance(number: int) -> float:
    """As WCAG 2 defines it."""
    place = number - 16
    parts = [LEVELS[place // 36] / 255, LEVELS[place // 6 % 6] / 255, LEVELS[place % 6] / 255]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("number", sorted({*TASKS, CYAN, GREEN, ORANGE, RED}))
def test_every_console_colour_has_contrast_on_black_and_on_white(number: int) -> None:
    assert 16 <= number < 232
    assert (luminance(number) + 0.05) / 0.05 >= 3.5
    assert 1.05 / (luminance(number) + 0.05) >= 3.5


def test_the_ten_task_colours_are_distinct_and_exclude_red() -> None:
    assert len({*TASKS}) == len(TASKS) == 10
    assert RED not in TASKS  # it means an error
