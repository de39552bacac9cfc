"""An interrupted training is compared with one that was not: equal, or what was lost is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proof.compare import Comparison, Repeat, compare, compare_repeats, render_difference
from launcher.proof.record import Record, Step
from launcher.tasks import TaskId
from tests.harness.builders.training_records import BATCHES, Trained, Training, lose

W0 = TaskId("worker", 0)
EXACT = Repeat(exact=True, inputs=True, noise=0.0)
EPOCHS = 3
STEPS = EPOCHS * BATCHES


def interrupt(killed: int, lost: tuple[str, ...] = (), **changes: object) -> Comparison:
    """Kills a training after some steps, and restores its newest checkpoint without what is `lost`."""
    whole, first = Training(EPOCHS).run(), Training(EPOCHS)
    before = first.run(steps=killed)
    saved = first.saved[max(first.saved)] if first.saved else Trained()
    begin = replace(lose(saved, lost), **changes)  # type: ignore[arg-type]  # the fields of Trained
    return compare({W0: whole}, [{W0: before}, {W0: Training(EPOCHS).run(begin)}], EXACT)


def references(comparison: Comparison) -> list[str]:
    return [flaw.reference for flaw in comparison.flaws]


@given(killed=st.integers(1, STEPS - 1))
def test_a_training_whose_whole_state_is_restored_is_exact_wherever_it_was_killed(killed: int) -> None:
    comparison = interrupt(killed)
    assert references(comparison) == []
    assert comparison.difference is None
    # A step after which the process dies is not in its checkpoint.
    assert comparison.start == (killed - 1) // BATCHES * BATCHES
    assert comparison.repeated == killed - comparison.start


def test_a_callback_may_change_the_weights_at_the_end_of_an_epoch_before_or_after_they_are_saved() -> None:
    whole, first = Training(EPOCHS, pulls=True).run(), Training(EPOCHS, pulls=True)
    before = first.run(steps=10)
    saved = first.saved[8]
    comparison = compare({W0: whole}, [{W0: before}, {W0: Training(EPOCHS, pulls=True).run(saved)}], EXACT)
    assert (comparison.start, references(comparison)) == (8, [])
    early = replace(saved, weights=int(whole.steps[7].state.digests["weights"], 16))
    comparison = compare({W0: whole}, [{W0: before}, {W0: Training(EPOCHS, pulls=True).run(early)}], EXACT)
    assert (comparison.start, references(comparison)) == (8, ["state-lost"])


@pytest.mark.parametrize(
    ("lost", "reference", "words"),
    [
        (("optimizer",), "optimizer-lost", "the optimizer's variables are not those after step 8"),
        (("iterations",), "optimizer-lost", "the optimizer's step is 0 instead of 8"),
        (("seeds",), "random-state", "Dropout began again"),
        (("rate",), "learning-rate", "the learning rate is 0.099 instead of"),
        (("epoch",), "epoch-lost", "went on in epoch 1 instead of 3"),
        (("shuffles",), "data-order", "worker:0 saw in epoch 3 the batches of epoch 1 again"),
        (("hidden",), "state-lost", "it is neither in the model"),
    ],
)
def test_each_part_of_the_state_that_is_lost_is_named(lost: tuple[str, ...], reference: str, words: str) -> None:
    comparison = interrupt(10, lost)
    assert references(comparison) == [reference]
    assert words in comparison.flaws[0].message
    if lost != ("epoch",):  # the steps are the same, but more follow
        assert comparison.difference == 9


@given(lost=st.sets(st.sampled_from(["optimizer", "iterations", "seeds", "rate", "shuffles"]), min_size=1))
def test_several_lost_parts_are_all_named(lost: set[str]) -> None:
    names = {"iterations": "optimizer-lost", "seeds": "random-state", "rate": "learning-rate", "shuffles": "data-order"}
    found = interrupt(10, tuple(lost))
    assert {names.get(name, "optimizer-lost") for name in lost} == {*references(found)}


def test_lost_weights_are_named_by_the_variables_that_differ() -> None:
    comparison = interrupt(10, weights=77)
    assert references(comparison) == ["state-lost"]
    assert "weights/0" in comparison.flaws[0].message
    assert comparison.start == 8  # by the optimizer's step


def test_data_that_begins_again_within_an_epoch_is_named_with_the_epoch() -> None:
    training = Training(EPOCHS, save_every=6)
    before = training.run(steps=7)
    begin = replace(training.saved[6], batch=0, shuffles=1)
    comparison = compare(
        {W0: Training(EPOCHS, save_every=6).run()}, [{W0: before}, {W0: Training(2).run(begin)}], EXACT
    )
    assert references(comparison) == ["data-restarted"]
    assert "began again at the start of epoch 2, not at its batch 3" in comparison.flaws[0].message


def test_a_program_that_writes_no_checkpoint_is_told_so() -> None:
    whole, before = Training(EPOCHS, save_every=0).run(), Training(EPOCHS, save_every=0).run(steps=10)
    comparison = compare({W0: whole}, [{W0: before}, {W0: whole}], EXACT)
    assert references(comparison) == ["no-checkpoint"]
    assert "10 steps were lost" in comparison.flaws[0].message


def test_a_fault_before_the_first_checkpoint_is_no_flaw_and_a_note_says_where_the_first_one_is() -> None:
    comparison = interrupt(3)
    assert references(comparison) == []
    assert comparison.notes == ("no checkpoint before step 4",)


def test_a_program_that_does_not_read_its_newest_checkpoint_is_told_so() -> None:
    first = Training(EPOCHS)
    before = first.run(steps=10)
    for begin, words in ((Trained(), "began again at step 1"), (first.saved[4], "went on after step 4")):
        comparison = compare({W0: Training(EPOCHS).run()}, [{W0: before}, {W0: Training(EPOCHS).run(begin)}], EXACT)
        assert references(comparison) == ["old-checkpoint"]
        assert f"training {words}, although step 8 was in a checkpoint" in comparison.flaws[0].message


def test_training_that_ends_earlier_is_named_although_each_of_its_steps_is_right() -> None:
    first = Training(EPOCHS)
    before = first.run(steps=6)
    comparison = compare({W0: Training(EPOCHS).run()}, [{W0: before}, {W0: Training(2).run(first.saved[4])}], EXACT)
    assert references(comparison) == ["ends-elsewhere"]
    assert "after step 8 instead of 12" in comparison.flaws[0].message


def test_a_second_fault_counts_from_where_the_first_restart_went_on() -> None:
    first, second = Training(EPOCHS), Training(EPOCHS)
    attempts = [{W0: first.run(steps=6)}, {W0: second.run(first.saved[4], steps=5)}]
    last = Training(EPOCHS).run(second.saved[4])
    comparison = compare({W0: Training(EPOCHS).run()}, [*attempts, {W0: last}], EXACT)
    assert references(comparison) == []
    assert (comparison.start, comparison.repeated) == (8, 1)


def change(record: Record, factor: float, place: int = 5) -> Record:
    def changed(number: int, step: Step) -> Step:
        if number < place or step.loss is None:
            return step
        digests = {**step.state.digests, "weights": f"other {number}"}
        return replace(step, loss=step.loss * factor, state=replace(step.state, digests=digests))

    return replace(record, steps=tuple(changed(*each) for each in enumerate(record.steps)))


def test_a_program_that_does_not_repeat_itself_is_compared_by_its_losses_and_only_larger_differences_count() -> None:
    whole = Training(EPOCHS).run()
    repeat = compare_repeats({W0: whole}, {W0: change(whole, 1.001)})
    assert (repeat.exact, repeat.inputs) == (False, True)
    assert repeat.where.startswith("at step 6: loss 1.")
    for factor, expected in ((1.002, []), (1.2, ["state-lost"])):
        first = Training(EPOCHS)
        before = first.run(steps=6)
        resumed = change(Training(EPOCHS).run(first.saved[4]), factor)
        comparison = compare({W0: whole}, [{W0: before}, {W0: resumed}], repeat)
        assert references(comparison) == expected


def test_two_equal_runs_repeat_exactly_and_runs_of_different_lengths_do_not() -> None:
    whole = Training(EPOCHS).run()
    assert compare_repeats({W0: whole}, {W0: whole}) == Repeat(exact=True, inputs=True, noise=0.0)
    assert compare_repeats({W0: whole}, {W0: Training(2).run()}).where == "12 and 8 steps"


def test_the_first_difference_is_shown_with_as_many_digits_as_it_needs() -> None:
    whole = Training(EPOCHS).run()
    first = Training(EPOCHS)
    before = first.run(steps=6)
    resumed = Training(EPOCHS).run(lose(first.saved[4], ["seeds"]))
    comparison = compare({W0: whole}, [{W0: before}, {W0: resumed}], EXACT)
    expected, found = whole.steps[4].loss, resumed.steps[0].loss
    text = render_difference(whole, resumed, comparison)
    assert text == f"first differs at step 5: loss {found:.4g} instead of {expected:.4g}"
