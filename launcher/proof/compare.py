"""Compares a run that was interrupted with runs that were not: where they differ first, and why.

The state with which the last attempt begins shows which step of the uninterrupted run it goes on from. From there on,
both must do the same. If they do not, the first things that differ are the reasons: what was not restored, or began
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from launcher.proof.models import Flaw
from launcher.proof.record import Record, Snapshot, Step
from launcher.tasks import TaskId
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass

Records = Mapping[TaskId, Record]
"""What each training task has done in one attempt."""

WIDER = 10.0
"""A difference counts if it is this many times as large as the largest between two runs without a fault, …"""
LEAST = 1e-4
"""… and at least this share of the value: the loss of a batch is computed from means in float32."""
SHOWN_NAMES = 2
WEIGHTS, OPTIMIZER, SEEDS = "weights", "optimizer", "seeds"


@dataclass(frozen=True)
class Repeat:
    """How well a program repeats itself without a fault.

    `exact`: whether the model is the same to the last bit after each step. `inputs`: whether the batches are. `noise`:
    the largest relative difference of a loss. `where`: the first difference.
    """

    exact: bool
    inputs: bool
    noise: float
    where: str = ""

    @property
    def tolerance(self) -> float:
        return max(self.noise * WIDER, LEAST)


@dataclass(frozen=True)
class Comparison:
    """What the last attempt of an interrupted run did.

    `start`: the number of steps of the uninterrupted run that its beginning contains; None if it did no step.
    `difference`: the first step that differs, from 1; None if none does.
    """

    start: int | None
    repeated: int
    difference: int | None
    flaws: tuple[Flaw, ...] = ()
    notes: tuple[str, ...] = ()


def compare_repeats(first: Records, second: Records) -> Repeat:
    """Compares two runs without a fault."""
    exact, inputs, noise, where = True, True, 0.0, ""
    for task in first:
        one, other = first[task].steps, second[task].steps if task in second else ()
        if len(one) != len(other):
            exact, inputs = False, False
            where = where or f"{len(one):,} and {len(other):,} steps"
        for number, (mine, theirs) in enumerate(zip(one, other, strict=False), 1):
            exact = exact and _digest(mine, WEIGHTS) == _digest(theirs, WEIGHTS)
            inputs = inputs and mine.input == theirs.input
            noise = max(noise, _distance(mine.loss, theirs.loss))
            if not where and (not exact or not inputs or noise > LEAST):
                what = (
                    _render_losses(mine.loss, theirs.loss, " and ") if noise > LEAST else "the last bits of the model"
                )
                where = f"at step {number:,}: {what if exact or noise > LEAST else 'the model'}"
    return Repeat(exact, inputs, noise, where)


def compare(whole: Records, attempts: Sequence[Records], repeat: Repeat) -> Comparison:
    """Compares an interrupted run with a run without a fault.

    Args:
        whole: the run without a fault.
        attempts: those of the interrupted run, in their order.
        repeat: how well the program repeats itself.
    """
    chief = min(whole)
    reference = whole[chief]
    trained = [number for number, each in enumerate(attempts) if each.get(chief, Record()).steps]
    if not trained:
        return Comparison(None, 0, None)
    done = saved = 0
    for number in trained[:-1]:
        before = attempts[number]
        begun = _find_start(reference, before[chief], done, repeat)
        done = max(done, begun + len(before[chief].steps))
        # Where all workers save, and one dies in it, the others' files are no checkpoint.
        newest = [max(save.at for save in record.saves) for record in before.values() if record.saves]
        saved = max(saved, begun + min(newest)) if newest else saved
    resumed = attempts[trained[-1]]
    own = resumed[chief]
    start = _find_start(reference, own, done, repeat)
    difference = _find_difference(reference, own, start, repeat)
    total = start + len(own.steps)
    flaws = [*_check_checkpoint(whole, start, done, saved)]
    if difference is not None or total != len(reference.steps):
        flaws += _explain(whole, resumed, start, difference, repeat)
    else:
        flaws += _check_epochs(reference, own, start, repeat)
    notes = [*_make_notes(whole, own, start, done)]
    return Comparison(start, max(done - start, 0), difference, tuple(flaws), tuple(notes))


def _find_start(whole: Record, resumed: Record, done: int, repeat: Repeat) -> int:
    """How many steps of the uninterrupted run the beginning of the attempt contains."""
    begin, first, limit = resumed.beginning, resumed.steps[0], len(whole.steps)
    if begin is None:  # a loop of the program's own, which counts its steps
        return next((number for number, step in enumerate(whole.steps) if step.batch == first.batch), 0)
    if repeat.exact:
        same = [
            number
            for number in range(limit + 1)
            if any(
                state.digests.get(WEIGHTS) == begin.state.digests.get(WEIGHTS) for state in whole.states_before(number)
            )
        ]
        if same:
            return max((number for number in same if number <= done), default=same[0])
    if begin.state.iterations:
        counted = [n for n in range(limit + 1) if whole.state_before(n).iterations == begin.state.iterations]
        if counted:
            return counted[0]
    return next((number for number, step in enumerate(whole.steps) if step.epoch == first.epoch), 0)


def _find_difference(whole: Record, resumed: Record, start: int, repeat: Repeat) -> int | None:
    for number, (expected, found) in enumerate(zip(whole.steps[start:], resumed.steps, strict=False), start + 1):
        if not _is_same(expected, found, repeat):
            return number
    return None


def _is_same(expected: Step, found: Step, repeat: Repeat) -> bool:
    if repeat.exact and expected.state.digests:
        return _digest(expected, WEIGHTS) == _digest(found, WEIGHTS)
    return _distance(expected.loss, found.loss) <= repeat.tolerance


def _check_checkpoint(whole: Records, start: int, done: int, saved: int) -> Iterator[Flaw]:
    """Whether the attempt began with the newest complete checkpoint, which contained `saved` steps."""
    if done and not any(record.saves for record in whole.values()) and start == 0:
        yield Flaw(
            reference="no-checkpoint",
            message=f"the program writes no checkpoint: {count_of(done, 'step')} were lost",
        )
    elif start < saved:
        went = f"went on after step {start:,}" if start else "began again at step 1"
        yield Flaw(reference="old-checkpoint", message=f"training {went}, although step {saved:,} was in a checkpoint")


def _explain(whole: Records, resumed: Records, start: int, difference: int | None, repeat: Repeat) -> Iterator[Flaw]:
    """Why the attempt differs from the uninterrupted run, the first reason first."""
    chief = min(whole)
    reference, own = whole[chief], resumed[chief]
    found = [*_compare_beginnings(reference, own, start, repeat)]
    names = {flaw.reference for flaw in found}
    upto = len(own.steps) if difference is None else difference - start
    for flaw in [*_compare_rates(reference, own, start, upto), *_compare_inputs(whole, resumed, start, upto, repeat)]:
        if flaw.reference not in names:
            names.add(flaw.reference)
            found.append(flaw)
    if difference is not None and not found:
        found.append(
            Flaw(
                reference="state-lost",
                message="something that training depends on began again, and it is neither in the model nor in its "
                "optimizer, the learning rate or the data",
            )
        )
    yield from found
    if not found:  # otherwise, it ends elsewhere because of them
        yield Flaw(
            reference="ends-elsewhere",
            message=f"training ended after step {start + len(own.steps):,} instead of {len(reference.steps):,}",
        )


def _compare_beginnings(whole: Record, resumed: Record, start: int, repeat: Repeat) -> Iterator[Flaw]:
    """What was not restored when the attempt began."""
    begin, expected, first = resumed.beginning, whole.state_before(start), resumed.steps[0]
    if begin is None:
        return
    after = f"those after step {start:,}" if start else "those at the beginning"
    if repeat.exact and begin.state.digests.get(WEIGHTS) != expected.digests.get(WEIGHTS):
        names = _find_changed(whole, begin, start)
        of = f", such as {', '.join(names[:SHOWN_NAMES])}," if names else ""
        yield Flaw(reference="state-lost", message=f"variables of the model{of} are not {after}")
    if begin.state.iterations != expected.iterations:
        yield Flaw(
            reference="optimizer-lost",
            message=f"the optimizer's step is {begin.state.iterations} instead of {expected.iterations}",
        )
    elif repeat.exact and begin.state.digests.get(OPTIMIZER) != expected.digests.get(OPTIMIZER):
        yield Flaw(reference="optimizer-lost", message=f"the optimizer's variables are not {after}")
    if repeat.exact and begin.state.digests.get(SEEDS) != expected.digests.get(SEEDS):
        yield Flaw(reference="random-state", message="the random numbers of layers such as Dropout began again")
    if whole.beginning is not None and begin.state.random == whole.beginning.state.random != expected.random:
        yield Flaw(reference="random-state", message="the global random numbers of Python and NumPy began again")
    if start < len(whole.steps) and first.epoch != whole.steps[start].epoch:
        yield Flaw(
            reference="epoch-lost",
            message=f"training went on in epoch {first.epoch} instead of {whole.steps[start].epoch}",
        )


def _find_changed(whole: Record, begin: Snapshot, start: int) -> list[str]:
    """The variables of the model that differ from those of the uninterrupted run, if it read them at this step."""
    known = next((each for each in whole.snapshots if each.at == start), None)
    if known is None:
        return []
    mine, theirs = begin.parts.get(WEIGHTS, {}), known.parts.get(WEIGHTS, {})
    return [name for name in theirs if mine.get(name) != theirs[name]]


def _compare_rates(whole: Record, resumed: Record, start: int, upto: int) -> Iterator[Flaw]:
    for number, (expected, found) in enumerate(zip(whole.steps[start:], resumed.steps[:upto], strict=False), start + 1):
        if _distance(expected.state.rate, found.state.rate) > LEAST:
            yield Flaw(
                reference="learning-rate",
                message=f"the learning rate is {found.state.rate:.4g} instead of {expected.state.rate:.4g} at step "
                f"{number:,}",
            )
            return


def _compare_inputs(whole: Records, resumed: Records, start: int, upto: int, repeat: Repeat) -> Iterator[Flaw]:
    """Whether the tasks saw other batches, and which."""
    if not repeat.inputs:
        return
    for task in sorted(resumed):
        reference = whole[task].steps
        for number, (expected, found) in enumerate(
            zip(reference[start:], resumed[task].steps[:upto], strict=False), start
        ):
            if expected.input == found.input or found.input is None:
                continue
            known = [place for place, step in enumerate(reference) if step.input == found.input]
            yield _render_input(task, number, reference, known)
            return


def _render_input(task: TaskId, number: int, reference: Sequence[Step], known: Sequence[int]) -> Flaw:
    """`known`: the steps that saw the batch which the task saw in step `number`, both from 0."""
    expected = reference[number]
    epochs = {reference[place].epoch: reference[place].batch for place in reversed(known)}
    if epochs.get(expected.epoch) == 1:
        return Flaw(
            reference="data-restarted",
            message=f"the data began again at the start of epoch {expected.epoch}, not at its batch {expected.batch}",
        )
    earlier = [epoch for epoch in epochs if epoch != expected.epoch]
    if earlier:
        return Flaw(
            reference="data-order",
            message=f"{task} saw in epoch {expected.epoch} the batches of epoch {earlier[-1]} again",
        )
    return Flaw(reference="data-order", message=f"{task} saw other batches, from step {number + 1:,} on")


def _check_epochs(whole: Record, resumed: Record, start: int, repeat: Repeat) -> Iterator[Flaw]:
    """Whether the results of whole epochs are the same."""
    expected = {each.at: each for each in whole.snapshots if each.kind == "epoch"}
    begin = start
    for each in resumed.snapshots:
        other = expected.get(start + each.at)
        if each.kind != "epoch" or other is None:
            continue
        first = next((step.batch for step in resumed.steps[begin - start :]), None)
        begin = start + each.at
        for name in other.logs if first == 1 else ():
            if _distance(other.logs[name], each.logs.get(name)) > repeat.tolerance:
                values = _render_losses(each.logs.get(name), other.logs[name], " instead of ", name)
                yield Flaw(reference="metrics", message=f"after epoch {each.epoch}, {values}")
                return


def _make_notes(whole: Records, own: Record, start: int, done: int) -> Iterator[str]:
    first = min((save.at for record in whole.values() for save in record.saves), default=None)
    if start == 0 and done and first is not None and first > done:
        yield f"no checkpoint before step {first:,}"
    batch = own.steps[0].batch
    if own.beginning is not None and batch is not None and batch > 1:
        yield f"the metrics of epoch {own.steps[0].epoch} are those of its last part"


def render_difference(whole: Record, resumed: Record, comparison: Comparison) -> str:
    """`first differs at step 412: loss 0.3121 instead of 0.3098`; empty if nothing does."""
    if comparison.difference is None or comparison.start is None:
        return ""
    expected = whole.steps[comparison.difference - 1]
    found = resumed.steps[comparison.difference - 1 - comparison.start]
    differs = f"first differs at step {comparison.difference:,}"
    if _distance(expected.loss, found.loss) > LEAST:
        return f"{differs}: {_render_losses(found.loss, expected.loss, ' instead of ')}"
    return f"{differs}: the model"


def _digest(step: Step, group: str) -> str | None:
    return step.state.digests.get(group)


def _distance(one: float | None, other: float | None) -> float:
    """The relative difference; infinite if only one is a number."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def _render_losses(one: float | None, other: float | None, between: str, name: str = "loss") -> str:
    """`loss 0.3121 instead of 0.3098`, with as many digits as differ."""
    if one is None or other is None:
        return f"{name} {one}{between}{other}"
    digits = next((digits for digits in range(4, 12) if f"{one:.{digits}g}" != f"{other:.{digits}g}"), 12)
    return f"{name} {one:.{digits}g}{between}{other:.{digits}g}"
