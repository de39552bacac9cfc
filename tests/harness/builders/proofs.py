"""Results of `distlaunch test-resume`, made without running anything."""

from __future__ import annotations

from typing import Any

from launcher.proof.models import FaultResult, Flaw, Point, ResumeProof

STEPS = 40


def make_losses(first: int = 1, *, away: float = 0.0) -> list[Point]:
    """A falling loss from the step `first` to the last; `away`: how far it is from that of the run without a fault."""
    return [Point(step=step, loss=10 / step + away) for step in range(first, STEPS + 1)]


def make_fault_result(**changes: Any) -> FaultResult:
    """A worker died after step 25, and the program went on after step 20, exactly."""
    facts: dict[str, Any] = {
        "name": "in an epoch",
        "faults": ["kill:worker:1@step=25"],
        "exact": True,
        "resumed_after": 20,
        "repeated": 5,
        "losses": make_losses(21),
        "seconds": 7.1,
        "directory": "/tests/x/fault-1/run",
        **changes,
    }
    return FaultResult(**facts)


def make_flaw(**changes: Any) -> Flaw:
    facts: dict[str, Any] = {
        "reference": "learning-rate",
        "message": "the learning rate is 0.01 instead of 0.0025 at step 21",
        "hint": "compute the learning rate from the step",
        "place": "train.py:31",
        **changes,
    }
    return Flaw(**facts)


def make_inexact_result(**changes: Any) -> FaultResult:
    """The same, but the program went on with another learning rate."""
    facts: dict[str, Any] = {
        "name": "at a preemption",
        "exact": False,
        "first_difference": 22,
        "difference": "first differs at step 22: loss 0.5545 instead of 0.4545",
        "flaws": [make_flaw()],
        "losses": make_losses(21, away=0.1),
        **changes,
    }
    return make_fault_result(**facts)


def make_proof(*results: FaultResult, **changes: Any) -> ResumeProof:
    facts: dict[str, Any] = {
        "exact": all(result.exact for result in results),
        "repeats": True,
        "program": "train.py --epochs 4",
        "steps": STEPS,
        "losses": make_losses(),
        "results": list(results),
        "directory": "/tests/x",
        **changes,
    }
    return ResumeProof(**facts)


def make_hostile_proof(text: str) -> ResumeProof:
    """A proof with this text in each field that has text."""
    result = make_inexact_result(
        name=text,
        faults=[text],
        difference=text,
        flaws=[make_flaw(message=text, hint=text, place=text)],
        notes=[text],
        directory=text,
    )
    return make_proof(result, repeats=False, noise=text, program=text, left_out=[text], directory=text)
