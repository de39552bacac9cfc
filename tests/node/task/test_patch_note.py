"""The note about the Keras patch: one line, and only if a program trains with Keras."""

from __future__ import annotations

from launcher.console.messages import render_patches
from launcher.gang.events import TaskExited, TaskReported
from launcher.tasks import TaskId
from worker_entry.protocol.values import KerasPatch, TaskExit

COVERS = ("worker_entry/keras_patches", "launcher/console")

W0 = TaskId("worker", 0)


def told(patch: KerasPatch | None) -> TaskReported:
    return TaskReported(W0, "is training", 1000.0, keras=patch)


def test_the_patch_note_has_the_keras_version_the_fault_count_and_the_option() -> None:
    line = "Keras 3.15.1: 8 faults patched for multi-worker training (--set keras.patch=false turns this off)"
    assert [*render_patches(told(KerasPatch("3.15.1", 8)))] == [line]
    assert "1 fault patched" in next(render_patches(told(KerasPatch("3.15.1", 1))))


def test_code_of_keras_that_the_patches_do_not_know_is_named_even_if_nothing_is_patched() -> None:
    changed = "Keras 4.0 has changed this code, so it is not patched, and training may fail or be wrong: fit, evaluate"
    assert [*render_patches(told(KerasPatch("4.0", 0, ["fit", "evaluate"])))] == [changed]
    assert [*render_patches(told(KerasPatch("4.0", 3, ["fit", "evaluate"])))][1:] == [changed]


def test_events_without_a_keras_patch_have_no_patch_note() -> None:
    assert [*render_patches(told(None))] == []
    assert [*render_patches(TaskExited(W0, TaskExit(0), 1000.0))] == []
