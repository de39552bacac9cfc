"""Which faults a program is tested with, and when: chosen from a run without a fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from launcher.gang.faults import Fault
from launcher.proof.record import Record
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Injection

Choice = Literal["quick", "usual", "full"]


@dataclass(frozen=True)
class Phase:
    """Faults that are injected into one run, and a name for when that is."""

    name: str
    faults: tuple[Fault, ...]


def choose_phases(records: Mapping[TaskId, Record], nodes: Sequence[Sequence[TaskId]], choice: Choice) -> list[Phase]:
    """The phases, in the order in which they are tested; those that this program does not have are left out.

    Args:
        records: what each training task did without a fault.
        nodes: the training tasks of each node.
        choice: how many faults.
    """
    steps = min(len(record.steps) for record in records.values())
    last, chief = max(records), min(records)
    middle, end = _find_middle(records[chief], steps), _find_epoch_end(records[chief], steps)
    saver, save = _find_save(records)
    quick = [Phase("in an epoch", (_at_step("kill", last, middle),))]
    if save:
        quick.append(Phase("while a checkpoint is written", (_at("kill", saver, "save", save),)))
    # The platform's KILL follows an epoch later: a test cannot wait for the half minute that it takes.
    killed = min(middle + steps // max(len(_epoch_ends(records[chief])), 1), steps - 1)
    quick.append(Phase("at a preemption", (_at_step("preempt", last, middle), _at_step("kill", last, killed))))
    if choice == "quick":
        return quick
    usual = [Phase("before the first step", (_at_step("kill", last, 0),)), *quick]
    if end:
        usual.append(Phase("at the end of an epoch", (_at_step("kill", last, end),)))
    if chief != last:
        usual.append(Phase("in an epoch, of the chief", (_at_step("kill", chief, middle),)))
        lost = nodes[-1]
        usual.append(Phase("of a whole node", tuple(_at_step("kill", task, middle) for task in lost)))
    if save:
        usual.append(Phase("at a full disk", (_at("full-disk", saver, "save", save),)))
    if choice == "usual":
        return usual
    return [*usual, *_find_more(records, last, steps)]


def _find_more(records: Mapping[TaskId, Record], last: TaskId, steps: int) -> Iterator[Phase]:
    """A fault in each tenth of the run, and at each checkpoint."""
    for step in sorted({max(steps * tenth // 10, 1) for tenth in range(10)}):
        yield Phase(f"at step {step:,}", (_at_step("kill", last, step),))
    saver, _ = _find_save(records)
    for number in range(1, len(records[saver].saves) + 1):
        yield Phase(f"while checkpoint {number} is written", (_at("kill", saver, "save", number),))


def _find_middle(record: Record, steps: int) -> int:
    """A step in the middle of an epoch in the middle of the run."""
    begins = [0, *(end for end in _epoch_ends(record) if end < steps)]
    begin = begins[len(begins) // 2]
    end = next((each for each in _epoch_ends(record) if each > begin), steps)
    return max(min(begin + (end - begin) // 2, steps - 1), 1)


def _find_epoch_end(record: Record, steps: int) -> int:
    """The last step of an epoch in the middle of the run; 0 if the run has only one epoch."""
    ends = [end for end in _epoch_ends(record) if end < steps]
    return ends[len(ends) // 2] if ends else 0


def _epoch_ends(record: Record) -> list[int]:
    return [each.at for each in record.snapshots if each.kind == "epoch"]


def _find_save(records: Mapping[TaskId, Record]) -> tuple[TaskId, int]:
    """A task that writes checkpoints, and the number of one in the middle; 0 if no task does."""
    saver = max(records, key=lambda task: (len(records[task].saves), -task.index))
    count = len(records[saver].saves)
    return saver, count // 2 + 1 if count else 0


def _at_step(what: str, task: TaskId, step: int) -> Fault:
    return _at(what, task, "step", step)


def _at(what: str, task: TaskId, at: str, value: int) -> Fault:
    return Fault(task, Injection(what, at, float(value)))
