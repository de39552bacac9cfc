"""Workers whose models are no longer the same are named, with the first variable that differs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from launcher.console.messages import render_news
from launcher.gang.divergence import KEPT
from launcher.gang.events import Event, TaskReported
from launcher.gang.state import AttemptState
from launcher.tasks import TaskId
from tests.harness.builders.gang import ONE_NODE, W0, W1, W2, make_policy, play, running
from worker_entry.agent.tasks.status_reader import STATUS_LIMIT, StatusFiles
from worker_entry.keras_patches.digests import LONGEST_NAME, SEEN_S, SHARE, Rhythm, _find_stride, _grouped
from worker_entry.protocol.costs import COSTS
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Status
from worker_entry.protocol.values import MOST_PARTS, ModelDigest, TaskStatus
from worker_entry.task.status_file import StatusFile

NAMES = ["dense/kernel", "dense/bias", "counting/above"]
SAME = ["00000001", "00000002", "00000003"]
LAST_DIFFERS = ["00000001", "00000002", "ffffffff"]
THREE = {"a": [W0, W1, W2]}


def digest(epoch: int, parts: Sequence[str] = SAME, *, fit: int = 1, ended: bool = False) -> ModelDigest:
    return ModelDigest(fit, epoch, ended, NAMES, list(parts))


def reported(task: TaskId, model: ModelDigest | None) -> TaskReported:
    return TaskReported(task, "is training", 1000.0, model=model)


def follow(nodes: dict[str, list[TaskId]], *events: Event) -> AttemptState:
    policy = make_policy(nodes)
    state, _ = play(policy, *running(policy), *events)
    return state


def test_equal_models_are_not_reported_as_diverged() -> None:
    state = follow(ONE_NODE, *(reported(task, digest(epoch)) for epoch in (1, 2, 3) for task in (W0, W1)))
    assert state.divergence == ""


def test_a_divergence_names_the_workers_and_the_first_different_variable() -> None:
    state = follow(THREE, *(reported(task, digest(2)) for task in (W0, W2)), reported(W1, digest(2, LAST_DIFFERS)))
    assert state.divergence == (
        "the model of worker:1 differs from those of worker:0, worker:2 after epoch 2, first in counting/above; "
        "only the chief's is saved"
    )


def test_models_that_all_differ_are_compared_with_the_first_worker() -> None:
    apart = [reported(task, digest(1, [f"0000000{task.index}", *SAME[1:]], ended=True)) for task in (W0, W1, W2)]
    assert follow(THREE, *apart).divergence.startswith(
        "the models of worker:1, worker:2 differ from that of worker:0 at the end, first in dense/kernel; "
    )


def test_no_divergence_is_reported_before_all_workers_have_reported_the_epoch() -> None:
    state = follow(THREE, reported(W0, digest(1)), reported(W1, digest(1, LAST_DIFFERS)))
    assert state.divergence == ""


@pytest.mark.parametrize(
    "other", [digest(2, LAST_DIFFERS), digest(1, LAST_DIFFERS, fit=2), digest(1, LAST_DIFFERS, ended=True)]
)
def test_model_digests_of_different_epochs_or_fits_are_not_compared(other: ModelDigest) -> None:
    assert follow(ONE_NODE, reported(W0, digest(1)), reported(W1, other)).divergence == ""


def test_a_late_model_digest_is_compared_with_earlier_digests_of_other_workers() -> None:
    early = [reported(W0, digest(epoch)) for epoch in range(1, KEPT + 1)]
    assert follow(ONE_NODE, *early, reported(W1, digest(1, LAST_DIFFERS))).divergence != ""


def test_a_status_without_a_model_digest_keeps_the_last_digest() -> None:
    state = follow(ONE_NODE, reported(W0, digest(1)), reported(W0, None), reported(W1, digest(1, LAST_DIFFERS)))
    assert state.divergence != ""


def test_models_of_different_sizes_are_reported_by_their_number_of_variables() -> None:
    state = follow(ONE_NODE, reported(W0, digest(1)), reported(W1, ModelDigest(1, 1, False, NAMES[:2], SAME[:2])))
    assert "first in the number of variables" in state.divergence


def test_only_the_first_divergence_produces_a_message() -> None:
    policy = make_policy(ONE_NODE)
    events: list[Event] = [reported(W0, digest(1)), reported(W1, digest(1, LAST_DIFFERS)), reported(W0, digest(2))]
    before, _ = play(policy, *running(policy))
    said = []
    for count in range(1, len(events) + 1):
        after, _ = play(policy, *running(policy), *events[:count])
        said.append(render_news(before, after, events[count - 1]))
        before = after
    assert [line is not None and line.startswith("The model of worker:1 differs") for line in said] == [
        False,
        True,
        False,
    ]


def attempt_files(folder: Path) -> AttemptFiles:
    files = AttemptFiles(str(folder), 1)
    Path(files.directory).mkdir(exist_ok=True)
    return files


# --- The task's side ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one_s", "digest_s", "expected"),
    [
        (10.0, 0.01, 1),
        (SEEN_S, SEEN_S * SHARE, 1),
        (SEEN_S / 5, 0.0001, 8),
        (10.0, 1.0, 16),  # a hundredth of ten epochs
        (0.0, 0.0, 2048),
    ],
)
def test_the_epochs_between_model_digests_grow_with_the_cost_of_a_digest(
    one_s: float, digest_s: float, expected: int
) -> None:
    assert _find_stride(one_s, digest_s) == expected


def test_short_epochs_get_few_model_digests() -> None:
    now, digests = [0.0], list[int]()

    def compute(number: int) -> None:
        digests.append(number)
        now[0] += 0.2

    rhythm = Rhythm(lambda: now[0])
    for number in range(1, 101):
        rhythm.begin()
        now[0] += 1.0
        rhythm.end(number, partial(compute, number), allowed=number != 64)
    assert digests == [1, 32, 96], "0.2 s of 20 s each"


def test_a_model_digest_groups_variables_if_there_are_too_many() -> None:
    count = 2 * MOST_PARTS + 1
    names, parts = _grouped([f"v{number}" for number in range(count)], [f"{number:08x}" for number in range(count)])
    assert len(names) == len(parts) <= MOST_PARTS
    assert names[1] == "v3"
    assert len(set(parts)) == len(parts)
    assert {len(part) for part in parts} == {8}


def test_a_model_digest_is_read_once_until_a_new_one_is_written(tmp_path: Path) -> None:
    files = attempt_files(tmp_path)
    written, read = StatusFile(files.status("worker:0")), StatusFiles(files, "worker:0")

    def models() -> list[ModelDigest | None]:
        status = read.read_changed()
        return [] if status is None else [status.model]

    assert models() == [None]
    written.report_model(digest(1))
    assert models() == [digest(1)]
    written.report_phase("is training")
    assert models() == [None]
    written.report_model(digest(2))
    assert models() == [digest(2)]
    read.forget_last()  # the agent has another controller
    assert models() == [digest(2)]


def test_the_largest_model_digest_fits_into_a_status_file_and_a_frame(tmp_path: Path) -> None:
    names = [f"layer_{number:04}".ljust(LONGEST_NAME, "x") for number in range(MOST_PARTS)]
    largest = ModelDigest(1, 1, False, names, ["0123abcd"] * MOST_PARTS)
    files = attempt_files(tmp_path)
    StatusFile(files.status("worker:0")).report_model(largest)
    status = StatusFiles(files, "worker:0").read_changed()
    assert status is not None
    assert status.model == largest
    assert Path(files.status("worker:0")).stat().st_size < STATUS_LIMIT
    assert len(encode(Status("worker:0", TaskStatus("x", 0.0, model=largest)))) < COSTS[Status].header
