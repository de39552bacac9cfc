"""Which processes of JAX a cluster waits for: only the leader opens a port, and each reports when it joins."""

from __future__ import annotations

from launcher.console.messages import render_separate
from launcher.gang.events import TaskReported
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import Phase
from launcher.gang.waiting import render_waiting
from launcher.spec.strategies import JAX
from launcher.tasks import TaskId
from tests.harness.builders.gang import ALL_HEARD, ONE_NODE, W0, W1, listening, make_policy, play, preparing, started
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.strategy_names import NO_STRATEGY
from worker_entry.protocol.values import HAS_IMPORTED, HAS_JOINED, Progress

_, IMPORTED = HAS_IMPORTED


def make_jax_policy() -> AttemptPolicy:
    return replace(make_policy(ONE_NODE), forming=frozenset({W0}), strategy=JAX)


def reported(task: TaskId, strategy: str = "") -> TaskReported:
    return TaskReported(task, IMPORTED, 1000.0, strategy=strategy)


def test_the_cluster_is_up_when_all_processes_have_joined() -> None:
    policy = make_jax_policy()
    begun = (*preparing(policy), *started(W0, W1), reported(W1), reported(W0, "jax"), *listening(W0), ALL_HEARD)
    state, _ = play(policy, *begun)
    assert (state.phase, state.missing) == (Phase.FORMING, [W1])
    assert render_waiting(state, 1010.0) == "waiting for worker:1 on a (has imported JAX, 10 s); worker:0 is ready"
    state, _ = play(policy, *begun, reported(W1, "jax"))
    assert (state.phase, state.missing) == (Phase.RUNNING, [])


def test_processes_that_begin_to_join_before_the_leaders_port_is_open_are_waited_for() -> None:
    policy = make_jax_policy()
    begun = (*preparing(policy), *started(W0, W1), ALL_HEARD, reported(W0, "jax"), reported(W1, "jax"))
    state, _ = play(policy, *begun)
    assert state.phase is Phase.FORMING
    state, _ = play(policy, *begun, *listening(W0))
    assert state.phase is Phase.RUNNING


def test_processes_that_have_joined_at_an_address_of_their_own_need_no_port() -> None:
    policy = make_jax_policy()
    joined = (replace(reported(task, "jax"), phase=HAS_JOINED) for task in (W0, W1))
    state, _ = play(policy, *preparing(policy), *started(W0, W1), ALL_HEARD, *joined)
    assert state.phase is Phase.RUNNING


def test_a_script_that_has_reported_nothing_yet_is_waited_for() -> None:
    """The leader's port may open before the first report of another process has arrived."""
    policy = replace(make_jax_policy(), scripts=frozenset({W0, W1}))
    begun = (*preparing(policy), *started(W0, W1), reported(W0, "jax"), *listening(W0), ALL_HEARD)
    state, _ = play(policy, *begun)
    assert (state.phase, state.missing) == (Phase.FORMING, [W1])
    state, _ = play(policy, *begun, reported(W1, "jax"))
    assert state.phase is Phase.RUNNING


def test_a_command_that_cannot_report_is_not_waited_for() -> None:
    """It may run a Python that leaves our hooks out, such as `python -S`."""
    policy = make_jax_policy()
    state, _ = play(policy, *preparing(policy), *started(W0, W1), *listening(W0), ALL_HEARD)
    assert state.phase is Phase.RUNNING


def test_a_process_that_trains_without_having_joined_is_not_waited_for() -> None:
    policy = make_jax_policy()
    trains = replace(reported(W1), progress=Progress(2, 1, 2, 1001.0, 1002.0))
    state, _ = play(
        policy, *preparing(policy), *started(W0, W1), reported(W0, "jax"), *listening(W0), ALL_HEARD, trains
    )
    assert state.phase is Phase.RUNNING


def test_processes_that_train_apart_are_named_with_the_call_that_would_connect_them() -> None:
    policy = make_jax_policy()
    apart = (reported(W0, NO_STRATEGY), reported(W1, NO_STRATEGY))
    state, _ = play(policy, *preparing(policy), *started(W0, W1), *apart)
    assert render_separate(state) == (
        "worker:0, worker:1 train separately: the program does not call jax.distributed.initialize() or "
        "keras.distribution.initialize()"
    )
