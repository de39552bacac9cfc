"""A name of Keras 2 in a program is explained: real Keras says each of these sentences."""

from __future__ import annotations

import pytest

from launcher.verdict.known_failures import find_known
from launcher.verdict.removed_names import known_names
from tests.harness.builders.removed_names import STATEMENTS


def test_each_name_is_in_a_statement_here() -> None:
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
def test_names_of_a_program_itself_are_not(text: str) -> None:
    found = find_known([text])
    assert found is None or "Keras 3" not in found.hint
