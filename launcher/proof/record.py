"""Reads what the tasks of a run have recorded of their training; `worker_entry.task.trace` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from worker_entry.protocol.frozen import dataclass, field

LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class State:
    """What training depends on, at one moment.

    `digests`: of the model's `weights`, of the `optimizer`, and of the `seeds` of Keras's random generators; empty if
    the program trains in a loop of its own. `iterations`, `rate`: the optimizer's step and its learning rate; None if
    unknown. `random`: a digest of Python's and NumPy's global generators.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    iterations: int | None = None
    rate: float | None = None
    random: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step, and the state after it.

    `loss`: that of this step's batch; None if there is none. `batch`: counted from 1 within the epoch. `input`: a
    digest of the batch of this task; None if unknown.
    """

    epoch: int | None
    batch: int | None
    loss: float | None
    logs: Mapping[str, float]
    input: str | None
    state: State


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state when a `fit` begins or ends, or at the end of an epoch, after `at` steps of the attempt.

    `parts`: the digest of each variable, by group and by the variable's path.
    """

    kind: str
    at: int
    epoch: int | None
    logs: Mapping[str, float]
    parts: Mapping[str, Mapping[str, str]]
    state: State


@dataclass(frozen=True)
class Save:
    """A checkpoint that was written after `at` steps of the attempt."""

    at: int
    path: str


@dataclass(frozen=True)
class Record:
    """The training of one task in one attempt."""

    steps: tuple[Step, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    saves: tuple[Save, ...] = ()

    @property
    def beginning(self) -> Snapshot | None:
        """The state when the first `fit` begins; None in a loop of the program's own."""
        return next((each for each in self.snapshots if each.kind == "begin"), None)

    def states_before(self, number: int) -> list[State]:
        """The states between two steps, the last one first; `number`: of the step that follows, counted from 0.

        Callbacks may change the model at the end of an epoch, after its last step.
        """
        between = [each.state for each in self.snapshots if each.at == number and each.kind in ("begin", "epoch")]
        return [*reversed(between), *([self.steps[number - 1].state] if number else [])] or [State()]

    def state_before(self, number: int) -> State:
        """The state with which a step, counted from 0, begins."""
        return self.states_before(number)[0]


def parse_record(text: str) -> Record:
    """Reads the lines of one file; a last line that was cut off is ignored."""
    steps: list[Step] = []
    snapshots: list[Snapshot] = []
    saves: list[Save] = []
    for line in _read_lines(text.splitlines()):
        kind = line["kind"]
        if kind == "save":
            saves.append(Save(len(steps), line["path"]))
        elif kind in ("step", "report"):
            steps.append(_make_step(line, steps[-1] if steps else None))
        else:
            snapshots.append(
                Snapshot(
                    kind=kind,
                    at=len(steps),
                    epoch=line.get("epoch"),
                    logs=line.get("logs", {}),
                    parts=line["parts"],
                    state=_make_state(line),
                )
            )
    return Record(tuple(steps), tuple(snapshots), tuple(saves))


def _read_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _make_step(line: Mapping[str, Any], last: Step | None) -> Step:
    logs, is_report = line["logs"], line["kind"] == "report"
    batch = line["step"] if is_report else line["batch"]
    loss = logs.get(LOSS)
    if loss is not None and not is_report and last is not None and last.epoch == line["epoch"] and batch > 1:
        loss = _of_batch(loss, batch, last)
    return Step(
        epoch=line["epoch"], batch=batch, loss=loss, logs=logs, input=line.get("input"), state=_make_state(line)
    )


def _of_batch(mean: float, batch: int, last: Step) -> float:
    """The loss of the newest batch, from the means over the epoch that Keras reports."""
    before, count = last.logs.get(LOSS), last.batch
    if before is None or count is None or count >= batch:
        return mean
    return (mean * batch - before * count) / (batch - count)


def _make_state(line: Mapping[str, Any]) -> State:
    return State(
        digests=line.get("state", {}),
        iterations=line.get("iterations"),
        rate=line.get("rate"),
        random=line["random"],
    )
