"""Each flaw comes with what to change, and with the line of the program where that is."""

from __future__ import annotations

from typing import get_args

import pytest

from launcher.proof.advice import ADVICE, advise
from launcher.proof.models import Flaw, FlawName

PROGRAM = """
import keras
keras.callbacks.BackupAndRestore("a")
backup = keras.callbacks.BackupAndRestore(
    "b", save_freq=3)
model.fit(x, callbacks=[backup])
"""


def test_every_flaw_has_advice() -> None:
    assert ADVICE.keys() == {*get_args(FlawName)}


@pytest.mark.parametrize(
    ("reference", "place"),
    [("data-restarted", "train.py:4"), ("epoch-lost", "train.py:6"), ("learning-rate", "train.py:6")],
)
def test_the_line_is_that_of_the_call_that_has_the_flaw(reference: FlawName, place: str) -> None:
    [flaw] = advise([Flaw(reference=reference, message="")], "train.py", PROGRAM)
    assert (flaw.place, flaw.hint) == (place, ADVICE[reference].hint)


@pytest.mark.parametrize("source", ["", "def (", "print(1)", "x\0y"])
def test_a_program_whose_text_does_not_help_gets_advice_without_a_line(source: str) -> None:
    [flaw] = advise([Flaw(reference="epoch-lost", message="")], "train.py", source)
    assert flaw.place == ""
    assert flaw.hint
