"""Of workers that are out of step, the verdict says where each is, whichever worker gets TensorFlow's error."""

from __future__ import annotations

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "launcher/verdict")

PROGRAM = PROGRAMS / "out_of_step.py"


def line_of(text: str) -> str:
    """The place of the program's only line that begins with this text."""
    (number,) = (n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.strip().startswith(text))
    return f"{PROGRAM}:{number}"


NEXT_FIT = line_of("model.fit(x, y, batch_size=8, verbose=0)")


@pytest.mark.parametrize(
    ("how", "places"),
    [
        (
            "evaluate",
            f"worker:0 is in evaluate at {line_of('model.evaluate')}, worker:1 in fit at {NEXT_FIT}",
        ),
        (
            "evaluate-in-callback",
            f"worker:0 is in evaluate at {line_of('self.model.evaluate')}, worker:1 in fit at {NEXT_FIT}",
        ),
        ("fewer-batches", f"all are in fit at {line_of('model.fit(fewer_batches()')}"),
    ],
)
def test_workers_that_are_out_of_step_are_reported_with_their_lines(warm: Distlaunch, how: str, places: str) -> None:
    ran = warm("local", str(PROGRAM), how)
    assert f"Error: worker:0 and worker:1 are out of step: {places} [out-of-step]\n" in ran.stderr, ran.stderr
    assert "do not put such a call under an `if` for one worker" in ran.stderr
    assert (ran.status, ran.report["attempts"][0]["verdict"]["reference"]) == (1, "out-of-step")
