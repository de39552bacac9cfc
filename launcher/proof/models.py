"""The result of `distlaunch test-resume`."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result

FlawName = Literal[
    "no-checkpoint",
    "old-checkpoint",
    "half-checkpoint",
    "did-not-resume",
    "state-lost",
    "optimizer-lost",
    "learning-rate",
    "epoch-lost",
    "data-restarted",
    "data-order",
    "random-state",
    "metrics",
    "ends-elsewhere",
    "file-twice",
    "half-file",
    "file-lost",
]
"""Why a run did not go on as if nothing had happened."""


class Flaw(Result):
    """One reason why a resume is not exact."""

    reference: FlawName
    """The kind of flaw."""
    message: str
    """What differs, in one sentence without a full stop."""
    hint: str = ""
    """What to change in the program."""
    place: str = ""
    """The line to change, like `train.py:31`; empty if it is not known."""


class Point(Result):
    """The loss of one step."""

    step: int
    """From 1."""
    loss: float | None
    """The loss of the step's batch, on the first worker; null if it is not a finite number."""


class FaultResult(Result):
    """One run with faults, compared with the run without."""

    name: str
    """The phase, like `in an epoch`."""
    faults: list[str]
    """The faults, as `--chaos` takes them."""
    exact: bool
    """Whether the run went on as if nothing had happened."""
    resumed_after: int | None = None
    """How many steps the checkpoint contained with which the last attempt began; null if that attempt did no step."""
    repeated: int = 0
    """How many steps were done twice."""
    first_difference: int | None = None
    """The first step that differs, from 1; null if none does."""
    difference: str = ""
    """What differs there, like `first differs at step 412: loss 0.3121 instead of 0.3098`."""
    flaws: list[Flaw] = []
    """Why the resume is not exact; empty if it is."""
    notes: list[str] = []
    """What else was noticed."""
    losses: list[Point] = []
    """The losses of the last attempt."""
    seconds: float
    """How long the run took."""
    directory: str = ""
    """The folder of the run."""


class ResumeProof(Result):
    """Whether a program resumes exactly."""

    exact: bool
    """Whether it does, after each fault."""
    repeats: bool
    """Whether two runs without a fault were equal to the last bit; if not, only larger differences count."""
    noise: str = ""
    """Where the two runs differ; empty if they do not."""
    program: str
    """The program with its arguments."""
    steps: int
    """How many steps the run without a fault has."""
    losses: list[Point] = []
    """The losses of the run without a fault."""
    results: list[FaultResult]
    """The runs with faults, in their order."""
    left_out: list[str] = []
    """Faults that could not be injected, and why."""
    directory: str = ""
    """The folder with the files of all runs."""
