"""Whether a failed cluster is started again, and when, depending on what failed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.failures import FAILURES
from launcher.gang.restarts import (
    LONG_S,
    LONGEST_PAUSE_S,
    REMEMBERED,
    UNCOUNTED,
    UNCOUNTED_CONFIRMED,
    AttemptOutcome,
    GiveUp,
    Restart,
    decide_restart,
    price,
    remember,
)
from launcher.spec.parts import RestartSpec
from worker_entry.protocol.frozen import replace

FREE = [name for name, failure in FAILURES.items() if not failure.counted]


def ending(
    reference: str = "task-killed",
    started: float = 0.0,
    lasted: float = 5.0,
    *,
    trained: bool = True,
    saved: bool = False,
    step: int = 0,
) -> AttemptOutcome:
    return AttemptOutcome(reference, started, started + lasted, trained, saved, step)


def priced(*attempts: tuple[str, int | None], is_confirmed: bool = False) -> list[AttemptOutcome]:
    """Outcomes of attempts, each with its class and its last step; None if it made no step."""
    endings: list[AttemptOutcome] = []
    for reference, step in attempts:
        one = ending(reference, trained=step is not None, step=step or 0)
        endings.append(price(one, endings, is_confirmed=is_confirmed, is_guess=False))
    return endings


def decide(*endings: AttemptOutcome, **spec: Any) -> Restart | GiveUp:
    return decide_restart(RestartSpec(**{"max_restarts": 3, **spec}), endings)


class TestDecision:
    @pytest.mark.parametrize(
        ("saved", "gives_up"),
        [("s---", True), ("---", False), ("-----", False), ("s--", False), ("s--s--", False), ("s--s---", True)],
    )
    def test_a_run_that_stops_saving_checkpoints_is_not_restarted_after_three_attempts(
        self, saved: str, gives_up: bool
    ) -> None:
        """Attempts that never trained (`x`) do not count."""
        for between in ("", "x"):
            attempts = [*between.join(saved)]
            endings = [
                ending("preempted", float(index), trained=kind != "x", saved=kind == "s")
                for index, kind in enumerate(attempts)
            ]
            decision = decide(*endings, max_restarts=100)
            assert (isinstance(decision, GiveUp) and decision.fruitless) == gives_up

    @pytest.mark.parametrize(("steps", "gives_up"), [((9, 9, 3, 9), True), ((9, 9, 10, 9), False)])
    def test_a_run_that_reaches_new_steps_is_restarted_without_a_visible_checkpoint(
        self, steps: tuple[int, ...], gives_up: bool
    ) -> None:
        endings = [ending(started=index, saved=index == 0, step=step) for index, step in enumerate(steps)]
        assert isinstance(decide(*endings, max_restarts=100), GiveUp) == gives_up

    def test_a_run_without_restarts_ends_without_a_message(self) -> None:
        assert decide(ending(), max_restarts=0) == GiveUp()
        assert decide(ending("preempted"), max_restarts=0) == GiveUp()

    def test_a_run_is_restarted_up_to_max_restarts(self) -> None:
        assert decide(ending()) == Restart(0.0, 1, free=False)
        assert decide(*[ending()] * 3) == Restart(2.0, 3, free=False)
        assert decide(*[ending()] * 4) == GiveUp("not started again: 3 restarts did not help")

    @pytest.mark.parametrize("reference", FREE)
    def test_restarts_after_uncounted_failures_are_free_while_training_advances(self, reference: str) -> None:
        advancing = [(reference, 10 * number) for number in range(1, 10)]
        assert decide(*priced(*advancing)) == Restart(LONGEST_PAUSE_S, 0, free=True)
        assert decide(*priced(*advancing[:3], ("task-killed", 0))) == Restart(4.0, 1, free=False)
        assert isinstance(decide(*priced(*[("task-killed", 0)] * 3, (reference, 0))), Restart)

    @pytest.mark.parametrize("reference", FREE)
    def test_restarts_after_uncounted_failures_count_if_training_does_not_advance(self, reference: str) -> None:
        """For example, the program ends with `sys.exit(143)`, or finds the port of its own server taken."""
        once, again = priced(*[(reference, None)] * 2)
        assert (once.is_free, again.is_free) == (True, False)
        assert decide(*priced(*[(reference, None)] * 3), max_restarts=1) == GiveUp(
            "not started again: 1 restart did not help"
        )
        same = priced(*[(reference, 10)] * 9)
        assert [one.is_free for one in same] == [True] * (UNCOUNTED + 1) + [False] * (8 - UNCOUNTED)
        assert isinstance(decide(*same), GiveUp)
        between = priced(*[(reference, 10)] * 4, ("task-killed", 0), (reference, 10))
        assert between[-1].is_free

    def test_a_restart_is_counted_if_the_failure_class_is_a_guess(self) -> None:
        free = replace(ending("port-taken"), is_free=True)
        assert not price(free, (), is_confirmed=False, is_guess=True).is_free
        assert not price(replace(free, reference="task-killed"), (), is_confirmed=False, is_guess=False).is_free

    def test_the_first_step_of_a_run_is_an_advance(self) -> None:
        assert [one.is_free for one in priced(("preempted", 1), *[("preempted", None)] * 2)] == [True, True, False]

    def test_preemptions_confirmed_by_the_engine_are_free_up_to_a_higher_limit(self) -> None:
        untrained = priced(*[("preempted", None)] * 100, is_confirmed=True)
        assert sum(one.is_free for one in untrained) == UNCOUNTED_CONFIRMED
        advancing = priced(*(("preempted", number) for number in range(1, 101)), is_confirmed=True)
        assert all(one.is_free for one in advancing)

    def test_a_run_is_restarted_after_any_number_of_preemptions(self) -> None:
        preempted = [replace(ending("preempted"), is_free=True)] * 5000
        assert decide(*preempted) == Restart(LONGEST_PAUSE_S, 0, free=True)
        assert decide(*preempted, pause_s=0.0) == Restart(0.0, 0, free=True)

    @given(st.lists(st.sampled_from(["preempted", "task-killed"]), min_size=1, max_size=40), st.data())
    def test_a_restart_decision_depends_only_on_remembered_attempts(
        self, references: list[str], data: st.DataObject
    ) -> None:
        many = [
            replace(ending(reference, float(number)), is_free=reference == "preempted")
            for number, reference in enumerate(references * 10)
        ]
        spec = {"max_restarts": data.draw(st.integers(1, 300)), "period_s": data.draw(st.sampled_from([0.0, 20.0]))}
        kept: list[AttemptOutcome] = []
        for one in many:
            kept = remember([*kept, one])
        assert decide(*kept, **spec) == decide(*many, **spec)
        assert sum(one.is_free for one in kept) <= REMEMBERED

    def test_only_recent_restarts_count_if_a_period_is_set(self) -> None:
        often = [ending(started=10.0 * number) for number in range(4)]
        seldom = [ending(started=1000.0 * number) for number in range(9)]
        assert decide(*often, period_s=30) == Restart(4.0, 3, free=False)  # the first ended 30 s before the last
        assert decide(*often, period_s=60) == GiveUp("not started again: 3 restarts within 60 s did not help")
        assert decide(*seldom, period_s=60) == Restart(LONGEST_PAUSE_S, 1, free=False)

    def test_only_a_program_error_before_the_first_step_prevents_a_restart(self) -> None:
        given_up = decide(ending("task-failed", trained=False))
        assert given_up == GiveUp(
            "not started again: the program failed before its first training step, and would fail again"
        )
        assert isinstance(decide(ending("task-failed")), Restart)
        assert isinstance(decide(ending("task-killed", trained=False)), Restart)

    @pytest.mark.parametrize("reference", ["ended-early", "version-mismatch", "disk-full"])
    def test_failures_that_a_restart_cannot_fix_are_restarted_only_if_named(self, reference: str) -> None:
        assert decide(ending(reference)) == GiveUp(f"not started again: `restart.on` does not name {reference}")
        assert isinstance(decide(ending(reference), on=[reference]), Restart)

    @pytest.mark.parametrize("reference", ["no-program", "cannot-reach", "refused"])
    def test_other_errors_end_the_run_without_a_message(self, reference: str) -> None:
        assert decide(ending(reference)) == GiveUp()

    def test_restart_pauses_double_after_each_short_attempt(self) -> None:
        soon = [decide(*[ending()] * count, max_restarts=99, pause_s=2) for count in range(1, 8)]
        assert [restart.pause_s for restart in soon if isinstance(restart, Restart)] == [0, 2, 4, 8, 16, 32, 60]
        assert decide(*[ending()] * 5, ending(lasted=LONG_S), max_restarts=99) == Restart(0.0, 6, free=False)
        assert decide(ending(), pause_s=0) == Restart(0.0, 1, free=False)

    def test_the_restart_pause_stays_at_its_maximum_after_2000_restarts(self) -> None:
        assert decide(*[ending()] * 2000, max_restarts=5000) == Restart(LONGEST_PAUSE_S, 2000, free=False)

    @given(st.lists(st.sampled_from([*FAILURES]), min_size=1, max_size=40), st.integers(0, 5))
    def test_counted_restarts_never_exceed_max_restarts(self, references: list[str], limit: int) -> None:
        endings: list[AttemptOutcome] = []
        counted = 0
        for reference in references:
            one = ending(reference, trained=True, step=len(endings))
            endings.append(price(one, endings, is_confirmed=False, is_guess=False))
            decision = decide(*endings, max_restarts=limit)
            if isinstance(decision, GiveUp):
                break
            counted += not decision.free
            assert decision.count == counted <= limit
            assert decision.free == (reference in FREE)
