"""Errors about removed names of Keras 2 get a hint, and errors about a program's own names do not."""

from __future__ import annotations

import pytest

from launcher.verdict.known_failures import find_known
from launcher.verdict.removed_names import known_names
from tests.harness.builders.removed_names import STATEMENTS


def test_every_removed_keras_name_has_a_test_statement() -> None:
    assert [*STATEMENTS] == [hint.split("`")[1] for _, _, hint in known_names()]


@pytest.mark.parametrize(
    "text",
    [
        "AttributeError: module 'train' has no attribute 'text'",
        "AttributeError: 'Config' object has no attribute 'lr'",
        "ModuleNotFoundError: No module named 'my.experimental'",
        "TypeError: run() got an unexpected keyword argument 'text'",
    ],
)
def test_an_error_about_a_name_of_the_program_itself_has_no_keras_hint(text: str) -> None:
    found = find_known([text])
    assert found is None or "Keras 3" not in found.hint
