"""Compares what a launcher has said with the truth about a fault."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.verdicts.faults import SUCCEEDED, Fault


@dataclass(frozen=True)
class Answer:
    """A launcher's verdict: the class, the worker that it names, and its text about the cause."""

    reference: str
    worker: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Played:
    """One fault under one launcher; seconds count from the fault.

    Attributes:
        fault: the fault.
        answer: the verdict; None if the launcher has said none within its limit.
        said_s: until the launcher has shown its verdict.
        gone_s: until the launcher and all processes were gone; None if they stayed.
        left: the number of processes that stayed.
    """

    fault: Fault
    answer: Answer | None
    said_s: float | None
    gone_s: float | None
    left: int


@dataclass(frozen=True)
class Score:
    """What is right in a verdict."""

    task: bool
    cause: bool
    reference: bool


WRONG = Score(task=False, cause=False, reference=False)


def score(fault: Fault, answer: Answer | None) -> Score:
    """What is right in this answer to this fault."""
    if answer is None:
        return WRONG
    if not fault.is_one:
        right = answer.reference == SUCCEEDED
        return Score(task=right, cause=right, reference=right)
    task = answer.worker == fault.worker
    return Score(
        task=task,
        cause=task and fault.words in answer.text and (not fault.has_line or _names_line(fault, answer.text)),
        reference=answer.reference in fault.classes,
    )


def _names_line(fault: Fault, text: str) -> bool:
    """Whether the text has a line with the fault's marker, as `train.py:8` or as in a traceback."""
    return any(
        re.search(rf'{re.escape(file)}(?::|", line ){number}\b', text) is not None
        for file, number in fault.find_lines()
    )


@dataclass(frozen=True)
class Total:
    """The sum of the scores of a launcher; the times are medians of the real faults that it has named."""

    faults: int
    task: int
    cause: int
    reference: int
    said_s: float | None
    gone_s: float | None
    left: int


def add_up(played: Sequence[Played]) -> Total:
    scores = [score(one.fault, one.answer) for one in played]
    broken = [one for one in played if one.fault.is_one]
    return Total(
        faults=len(played),
        task=sum(each.task for each in scores),
        cause=sum(each.cause for each in scores),
        reference=sum(each.reference for each in scores),
        said_s=_median([one.said_s for one in broken]),
        gone_s=_median([one.gone_s for one in broken]),
        left=sum(one.left for one in played),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
