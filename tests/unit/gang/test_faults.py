"""Injected faults: each is injected once, at its moment, and the report says whether training resumed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.gang.faults import Fault, needed, parse_fault, pending
from launcher.gang.state import AttemptState
from launcher.report.fault_report import report_faults
from launcher.spec.command_line import make_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import ProgramSpec
from launcher.spec.settings import set_fields
from tests.harness.builders.chaos import KILL, attempt
from tests.harness.builders.gang import W1
from worker_entry.protocol.values import Injection


def spec_of(program: ProgramSpec | None = None) -> ClusterSpec:
    return make_spec(
        tasks={"worker": 2},
        strategy="multi_worker_mirrored",
        framework="tensorflow",
        program=program,
    )


class TestFaultParsing:
    @pytest.mark.parametrize(
        "text",
        [
            "kill:worker:1@epoch=3",
            "stop:worker:0@step=120",
            "exit:worker:1@seconds=2.5",
            "preempt:worker:1@step=0",
            "full-disk:worker:0@save=2",
        ],
    )
    def test_a_parsed_fault_is_rendered_as_the_same_text(self, text: str) -> None:
        assert str(parse_fault(text, spec_of())) == text

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("kill", "is not a fault"),
            ("kill:worker:1@epoch=soon", "is not a fault"),
            ("maim:worker:1@epoch=3", "cannot 'maim' a task"),
            ("kill:worker:1@moon=3", "does not know the moment 'moon'"),
            ("kill:worker:2@epoch=3", "has no worker:2"),
            ("full-disk:worker:1@epoch=3", "fills the disk at a save"),
            ("kill:walker:1@epoch=3", "is not a task"),
        ],
    )
    def test_an_invalid_fault_is_rejected_with_a_reason(self, text: str, why: str) -> None:
        with pytest.raises(UsageError, match=re.escape(why)):
            parse_fault(text, spec_of())

    def test_faults_need_a_python_program_and_epoch_faults_need_progress_reports(self) -> None:
        with pytest.raises(UsageError, match="needs a Python program"):
            parse_fault("kill:worker:1@seconds=3", spec_of(ProgramSpec(command=["./train"])))
        silent = set_fields(spec_of(), ["progress=false"])
        with pytest.raises(UsageError, match="needs `progress: true`"):
            parse_fault("kill:worker:1@epoch=3", silent)
        assert parse_fault("kill:worker:1@seconds=3", silent)


class TestFaultReport:
    def message(self, *states: AttemptState) -> tuple[int | None, bool | None, str]:
        [fault] = report_faults([KILL], dict(enumerate(states, 1)))
        return fault.attempt, fault.resumed, fault.message

    def test_fault_report_names_the_epoch_in_which_training_resumed(self) -> None:
        assert self.message(attempt(1, 3, injected=True), attempt(3, 6)) == (
            1,
            True,
            "worker:1 was killed in attempt 1, at epoch 3, step 21; attempt 2 resumed in epoch 3",
        )

    def test_fault_report_states_that_training_started_over(self) -> None:
        _, resumed, message = self.message(attempt(1, 3, injected=True), attempt(1, 6))
        assert resumed is False
        assert message.endswith("at epoch 3, step 21; attempt 2 started over in epoch 1: nothing was resumed")

    def test_fault_report_explains_why_nothing_was_injected_or_resumed(self) -> None:
        assert (
            self.message(attempt(1, 2))[2]
            == "kill:worker:1@epoch=3 was not injected: worker:1 reached epoch 2, step 21"
        )
        assert self.message(attempt())[2] == "kill:worker:1@epoch=3 was not injected: worker:1 reached no step"
        assert self.message(attempt(1, 3, injected=True))[2].endswith("; it was not started again")
        assert self.message(attempt(1, 3, injected=True), attempt())[2].endswith("; no later attempt did a step")

    @given(st.lists(st.tuples(st.sampled_from([(), (1, 2), (3, 6), (7, 9)]), st.booleans()), min_size=1, max_size=12))
    def test_fault_report_from_kept_attempts_equals_that_from_all_attempts(
        self, told: list[tuple[tuple[int, ...], bool]]
    ) -> None:
        states = [attempt(*epochs, injected=injected) for epochs, injected in told]
        kept: dict[int, AttemptState] = {}
        for number, state in enumerate(states, 1):
            kept = needed([KILL], {**kept, number: state})
        assert report_faults([KILL], kept) == report_faults([KILL], dict(enumerate(states, 1)))
        assert pending([KILL], kept.values()) == pending([KILL], states)

    def test_fault_report_keeps_only_the_attempts_that_it_needs(self) -> None:
        states = {1: attempt(1, 3, injected=True), **{number: attempt(3, 4) for number in range(2, 100)}}
        assert sorted(needed([KILL], states)) == [1, 2, 99]
        assert needed([], states) == {}

    def test_a_fault_is_injected_once(self) -> None:
        other = Fault(W1, Injection("kill", "epoch", 5.0))
        assert pending([KILL, other], []) == [KILL, other]
        assert pending([KILL, other], [attempt(1, 3, injected=True), attempt(3, 4)]) == [other]
