"""Which faults a program is tested with follows from its own epochs and checkpoints."""

from __future__ import annotations

from launcher.proof.phases import choose_phases
from launcher.proof.record import Record
from launcher.tasks import TaskId
from tests.harness.builders.training_records import Training

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def phases(records: dict[TaskId, Record], choice: str = "usual") -> dict[str, str]:
    found = choose_phases(records, [[W0], [W1]], choice)  # type: ignore[arg-type]  # a Choice
    return {phase.name: " ".join(map(str, phase.faults)) for phase in found}


def two(training: Training) -> dict[TaskId, Record]:
    """The first worker writes the checkpoints, as under a BackupAndRestore."""
    whole = training.run()
    return {W0: whole, W1: Record(whole.steps, whole.snapshots)}


def test_faults_come_in_each_phase_of_a_run_and_hit_the_task_that_saves() -> None:
    assert phases(two(Training(epochs=4))) == {
        "before the first step": "kill:worker:1@step=0",
        "in an epoch": "kill:worker:1@step=10",
        "while a checkpoint is written": "kill:worker:0@save=3",
        "at a preemption": "preempt:worker:1@step=10 kill:worker:1@step=14",
        "at the end of an epoch": "kill:worker:1@step=8",
        "in an epoch, of the chief": "kill:worker:0@step=10",
        "of a whole node": "kill:worker:1@step=10",
        "at a full disk": "full-disk:worker:0@save=3",
    }


def test_quick_has_three_faults_and_full_has_one_in_each_tenth_and_at_each_checkpoint() -> None:
    assert list(phases(two(Training(epochs=4)), "quick")) == [
        "in an epoch",
        "while a checkpoint is written",
        "at a preemption",
    ]
    full = phases(two(Training(epochs=5)), "full")
    assert [name for name in full if name.startswith("at step")] == [
        "at step 1",
        *(f"at step {n}" for n in range(2, 20, 2)),
    ]
    assert full["while checkpoint 4 is written"] == "kill:worker:0@save=4"


def test_without_checkpoints_no_fault_waits_for_one() -> None:
    assert not any("save" in fault for fault in phases(two(Training(save_every=0)), "full").values())


def test_a_run_of_one_worker_and_one_epoch_has_neither_a_chief_of_its_own_nor_the_end_of_an_epoch() -> None:
    found = choose_phases({W0: Training(epochs=1, save_every=0).run()}, [[W0]], "usual")
    assert [phase.name for phase in found] == ["before the first step", "in an epoch", "at a preemption"]
