"""When `-d` returns although the cluster is not up."""

from __future__ import annotations

from launcher.controller.detach import FORMING_S, WITHOUT_FRAMEWORK_S, find_departure
from launcher.gang.events import Event, TaskReported
from launcher.spec.strategies import TORCH
from tests.harness.builders.gang import TWO_NODES, W0, W1, listening, make_policy, play, preparing, started
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import NOT_IMPORTED

STARTED = 1000.0


def departure(after_s: float, *events: Event) -> str | None:
    policy = make_policy(TWO_NODES)
    state, _ = play(policy, *preparing(policy), *events)
    return find_departure(state, STARTED + after_s)


def test_detach_returns_after_two_seconds_if_no_task_imports_tensorflow() -> None:
    assert departure(WITHOUT_FRAMEWORK_S - 0.1, *started(W0, W1)) is None
    assert departure(WITHOUT_FRAMEWORK_S, *started(W0)) is None
    expected = "The tasks run, but have not imported TensorFlow; the run continues in the background"
    assert departure(WITHOUT_FRAMEWORK_S, *started(W0, W1)) == expected
    silent = TaskReported(W0, NOT_IMPORTED, STARTED)
    assert departure(WITHOUT_FRAMEWORK_S, *started(W0, W1), silent) == expected


def test_detach_returns_after_ten_seconds_and_names_the_missing_tasks() -> None:
    imports = TaskReported(W0, "is importing TensorFlow", STARTED)
    jax = TaskReported(W0, NOT_IMPORTED, STARTED, strategy="JAX")
    for known in ([imports], [jax], listening(W0)):
        assert departure(FORMING_S - 0.1, *started(W0, W1), *known) is None
        said = departure(FORMING_S, *started(W0, W1), *known)
        assert said is not None
        assert said.startswith("Not up after 10 s, waiting for worker:")
        assert "worker:1 on b (port 20001 not open)" in said


def test_detach_waits_ten_seconds_for_pytorch_tasks_without_a_report() -> None:
    policy = replace(make_policy(TWO_NODES), strategy=TORCH)
    state, _ = play(policy, *preparing(policy), *started(W0, W1))
    assert find_departure(state, STARTED + WITHOUT_FRAMEWORK_S) is None
    assert find_departure(state, STARTED + FORMING_S)


def test_detach_does_not_count_the_time_before_tasks_start() -> None:
    """Connecting, sending the program and the checks have no time limit: their errors are still shown."""
    assert departure(3600.0) is None
