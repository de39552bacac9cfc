"""The benchmark of verdicts plays a fault under distlaunch, whose verdict is right, and leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.benchmarks.verdicts.faults import FAULTS
from tests.benchmarks.verdicts.play import play
from tests.benchmarks.verdicts.score import Score, score
from tests.benchmarks.verdicts.tools import Distlaunch

COVERS = ("launcher/verdict", "launcher/gang")
PLAYED = ("wrapped-os-exit", "error-and-handler-exit", "none")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke) if name == PLAYED[0] else name for name in PLAYED]
)
def test_the_verdict_on_a_fault_of_the_benchmark_is_right(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    played = play(Distlaunch(), fault)
    assert score(fault, played.answer) == Score(task=True, cause=True, reference=True), played
    assert played.left == 0
    assert played.gone_s is not None
