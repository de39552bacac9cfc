"""The record of a task is read as it was written, even if its last line was cut off."""

from __future__ import annotations

import json

import pytest

from launcher.proof.record import parse_record

COMMON = {"state": {"weights": "a1"}, "random": "f0", "iterations": 1, "rate": 0.1}


def step(epoch: int, batch: int, mean: float) -> dict[str, object]:
    return {"kind": "step", "fit": 1, "epoch": epoch, "batch": batch, "logs": {"loss": mean}, "input": "b", **COMMON}


LINES: list[dict[str, object]] = [
    {"kind": "begin", "fit": 1, "parts": {"weights": {"dense/kernel": "a1"}}, **COMMON},
    step(1, 1, 4.0),
    step(1, 2, 3.0),
    {"kind": "save", "path": "/x/model.keras"},
    {"kind": "epoch", "fit": 1, "epoch": 1, "logs": {"loss": 3.0}, "parts": {}, **COMMON},
    step(2, 1, 1.5),
    step(2, 3, 2.5),
]


def test_the_loss_of_each_batch_is_computed_from_the_means_over_the_epoch() -> None:
    record = parse_record("\n".join(map(json.dumps, LINES)))
    # The last line stands for two steps in one execution.
    assert [each.loss for each in record.steps] == pytest.approx([4.0, 2.0, 1.5, 3.0])
    assert [(each.at, each.kind) for each in record.snapshots] == [(0, "begin"), (2, "epoch")]
    assert [(each.at, each.path) for each in record.saves] == [(2, "/x/model.keras")]
    assert record.state_before(0).digests == {"weights": "a1"}


def test_a_line_that_was_cut_off_is_ignored() -> None:
    text = "\n".join(map(json.dumps, LINES))
    assert parse_record(text[:-9]).steps == parse_record("\n".join(map(json.dumps, LINES[:-1]))).steps


def test_a_loop_of_the_programs_own_has_the_steps_and_losses_that_it_reports() -> None:
    reports = [
        {"kind": "report", "step": number, "epoch": 1, "logs": {"loss": 1 / number}, "random": ""}
        for number in (1, 2, 3)
    ]
    record = parse_record("\n".join(map(json.dumps, reports)))
    assert [(each.batch, each.loss) for each in record.steps] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert record.beginning is None
