"""The time that a program waits for its input is measured, in Python and in graphs, without breaking the program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.harness.available import needs_tf_keras
from tests.harness.places import PROGRAMS

COVERS = ("worker_entry/hooks",)

pytestmark = needs_tf_keras

PROGRAM = str(PROGRAMS / "input_ways.py")


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[float] | None]:
    """For each way in which the program gets input, the seconds that it waited and the seconds that passed."""
    folder = tmp_path_factory.mktemp("input")
    done = subprocess.run([sys.executable, PROGRAM], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shapes, found = done.stdout.splitlines()[-2:]
    assert shapes == "()"
    measured: dict[str, list[float] | None] = json.loads(found)
    return measured


WAYS = ["in Python", "inside out", "in a graph", "unrolled", "in a loop", "distributed"]
WAYS += [f"{library} fit{how}" for library in ("keras", "tf_keras") for how in ("", ", several steps in one")]


@pytest.mark.parametrize("way", WAYS)
def test_input_time_is_measured_once_for_every_way_to_read_input(
    times: Mapping[str, list[float] | None], way: str
) -> None:
    found = times[way]
    assert found is not None
    waited, passed = found
    # Ten batches of 20 ms; some ways prepare one or two while the program does something else.
    assert 0.14 < waited < passed


def test_input_time_does_not_include_computation(times: Mapping[str, list[float] | None]) -> None:
    assert times["nothing"] is None
    assert times["computing"] is not None
    assert times["computing"][0] == 0.0


def test_a_function_that_reads_measured_input_can_be_exported(times: Mapping[str, list[float] | None]) -> None:
    assert times["exported"] is not None


def test_input_time_of_a_deterministic_program_is_not_measured(times: Mapping[str, list[float] | None]) -> None:
    assert times["deterministic"] is None
