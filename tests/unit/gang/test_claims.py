"""A run claims the GPUs of all its nodes, or none, and waits without keeping a part."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Mapping

import pytest

from launcher.controller.detach import find_departure
from launcher.controller.inbox import from_message
from launcher.gang.claims import SHOWN, render_busy_gpus
from launcher.gang.decide import decide, new_attempt
from launcher.gang.events import (
    ClaimNodes,
    Event,
    Interrupted,
    NodeBusy,
    NodeClaimed,
    NodeLost,
    NodeReady,
    NodeRefused,
    PrepareNodes,
    ReleaseNodes,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import Phase, Reason
from tests.harness.builders.gang import W0, W1, play
from worker_entry.protocol.gpus import UNKNOWN_RUN, BusyGpu, GpuHolder, GpusClaimed

POLICY = AttemptPolicy(
    {"a": frozenset([W0]), "b": frozenset([W1])},
    frozenset([W0, W1]),
    start_s=30.0,
    drain_s=0.0,
    stop_grace_s=1.0,
    wait_gpus_s=0.0,
    claim_pause_s=5.0,
)
ALICE = BusyGpu("0", [GpuHolder(4242, "alice", "python")])
BOB = [GpuHolder(7, "bob", run="digits-7")]
READY = (NodeReady("a"), NodeReady("b"))
A_HAS, B_HAS, B_LACKS = NodeClaimed("a", ("0",)), NodeClaimed("b", ("1",)), NodeBusy("b", (ALICE,))


class TestRules:
    def test_an_attempt_continues_when_all_nodes_have_claimed_their_gpus(self) -> None:
        state, actions = play(POLICY, *READY, A_HAS, B_HAS)
        assert actions == [ClaimNodes(), PrepareNodes()]
        assert state.claimed == {"a": ("0",), "b": ("1",)}

    def test_if_one_node_lacks_gpus_all_nodes_release_theirs_and_retry(self) -> None:
        state, actions = play(POLICY, *READY, A_HAS, B_LACKS, 4.9, Tick())
        assert actions == [ClaimNodes(), ReleaseNodes()]
        assert (state.claimed, state.phase) == ({}, Phase.CLAIMING)
        state, actions = play(POLICY, *READY, A_HAS, B_LACKS, 5.0, Tick(), A_HAS, B_HAS)
        assert actions == [ClaimNodes(), ReleaseNodes(), ClaimNodes(), PrepareNodes()]
        assert state.claimed == {"a": ("0",), "b": ("1",)}

    def test_the_gpu_wait_is_unlimited_and_does_not_count_as_start_time(self) -> None:
        week = 7 * 86_400.0
        state, actions = play(POLICY, *READY, A_HAS, B_LACKS, week, Tick(), A_HAS, B_HAS, week + 29.0, Tick())
        assert (state.reason, actions[-1]) == (None, PrepareNodes())
        state, _ = play(POLICY, *READY, A_HAS, B_LACKS, week, Tick(), A_HAS, B_HAS, week + 30.0, Tick())
        assert state.reason is Reason.START_TIMEOUT

    def test_a_node_that_does_not_answer_a_gpu_claim_causes_a_start_timeout(self) -> None:
        state, _ = play(POLICY, *READY, A_HAS, 30.0, Tick())
        assert state.reason is Reason.START_TIMEOUT

    @pytest.mark.parametrize("limit_s", [3.0, 5.0, 7.0, 12.0])
    def test_at_the_gpu_wait_limit_nodes_are_asked_once_more(self, limit_s: float) -> None:
        policy = AttemptPolicy(
            POLICY.nodes, POLICY.forming, 30.0, 0.0, 1.0, wait_gpus_s=limit_s, claim_pause_s=POLICY.claim_pause_s
        )
        state, now, asked = new_attempt(policy, 0.0), 0.0, list[float]()
        events: list[Event] = [*READY]
        while state.reason is None:
            event = events.pop(0) if events else Tick()
            if isinstance(event, Tick):
                assert state.deadline is not None
                now = state.deadline
            state, actions = decide(state, event, now)
            if ClaimNodes() in actions:
                asked.append(now)
                events = [A_HAS, B_LACKS]
        assert state.reason is Reason.GPUS_BUSY
        assert asked == [*(time for time in (0.0, 5.0, 10.0) if time < limit_s), limit_s]
        assert now == limit_s

    def test_a_lost_node_ends_the_gpu_wait(self) -> None:
        state, _ = play(POLICY, *READY, A_HAS, B_LACKS, NodeLost("a", "cable pulled"))
        assert state.reason is Reason.NODE_LOST

    def test_an_interrupt_ends_the_gpu_wait(self) -> None:
        state, _ = play(POLICY, *READY, A_HAS, B_LACKS, Interrupted(signal.SIGINT))
        assert state.reason is Reason.INTERRUPTED

    def test_a_background_run_leaves_the_terminal_during_the_gpu_wait(self) -> None:
        said = "The run waits in the background, and starts once the GPUs are free"
        for events, why in (([A_HAS], None), ([A_HAS, B_LACKS], said), ([A_HAS, B_HAS], None)):
            assert find_departure(play(POLICY, *READY, *events)[0], 0.0) == why

    def test_late_and_repeated_gpu_claim_answers_are_ignored(self) -> None:
        state, _ = play(POLICY, *READY, A_HAS, NodeClaimed("a", ("7",)), NodeBusy("a", ()), B_HAS, NodeBusy("b", ()))
        assert (state.claimed, state.lacking, state.lacked) == ({"a": ("0",), "b": ("1",)}, {}, {})

    def test_no_gpu_is_claimed_without_wait_gpus_or_in_a_check(self) -> None:
        for policy in (
            AttemptPolicy(POLICY.nodes, POLICY.forming, 30.0, 0.0, 1.0),
            AttemptPolicy(POLICY.nodes, POLICY.forming, 30.0, 0.0, 1.0, wait_gpus_s=9.0, checks=True, only_checks=True),
        ):
            assert play(policy, *READY)[1] == [PrepareNodes()]

    @pytest.mark.parametrize("seed", range(100))
    def test_runs_that_claim_the_same_gpus_never_deadlock(self, seed: int) -> None:
        """Three runs on two nodes, each answered by the nodes in any order; a run that has its GPUs ends after 20 s."""
        chance = random.Random(seed)
        kept: dict[str, int] = {}
        runs = [
            new_attempt(
                AttemptPolicy(
                    POLICY.nodes, POLICY.forming, 0.0, 0.0, 1.0, wait_gpus_s=0.0, claim_pause_s=chance.uniform(4, 8)
                ),
                0.0,
            )
            for _ in range(3)
        ]
        orders: list[tuple[float, int, str]] = []
        """When a node gets an order of a run, and which."""
        ends: dict[int, float] = {}
        began: dict[int, float] = {}

        def tell(number: int, event: Event, now: float) -> None:
            runs[number], actions = decide(runs[number], event, now)
            for action in actions:
                for node in POLICY.nodes:
                    at = now + chance.uniform(0.001, 1.5)
                    if isinstance(action, ClaimNodes):
                        orders.append((at, number, node))
                    elif isinstance(action, ReleaseNodes) and kept.get(node) == number:
                        del kept[node]
                if isinstance(action, PrepareNodes):
                    assert set(kept.values()) == {number}
                    began[number], ends[number] = now, now + 20.0

        for number in range(3):
            for event in READY:
                tell(number, event, 0.0)
        now = 0.0
        while len(began) < 3:
            now += 0.05
            assert now < 300, "they wait for ever"
            for order in sorted(order for order in orders if order[0] <= now):
                orders.remove(order)
                _, number, node = order
                if kept.setdefault(node, number) == number:
                    tell(number, NodeClaimed(node, ("0",)), now)
                else:
                    tell(number, NodeBusy(node, (ALICE,)), now)
            for number, end in [*ends.items()]:
                if end <= now:
                    del ends[number]
                    for node in [node for node, holder in kept.items() if holder == number]:
                        del kept[node]
            for number, state in enumerate(runs):
                if number not in began:
                    tell(number, Tick(), now)
                    if state.claims_again is not None:
                        assert number not in kept.values(), "it waits, and keeps a part"
        times = sorted(began.values())
        assert all(later - earlier >= 20.0 for earlier, later in itertools.pairwise(times))


def test_gpu_claim_answers_of_nodes_become_events() -> None:
    assert from_message("b", GpusClaimed(1, ["1"])) == B_HAS
    assert from_message("b", GpusClaimed(1, [], [ALICE])) == B_LACKS
    event = from_message("b", GpusClaimed(1, [], problem="neither NVML nor nvidia-smi answers"))
    assert isinstance(event, NodeRefused)
    assert event.problems[0].reference == "gpus-unknown"
    assert event.problems[0].message == "cannot tell which GPUs are free: neither NVML nor nvidia-smi answers"


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ({"a": (ALICE,)}, "GPU 0 of a is used by pid 4242 (python) of alice"),
        ({"local": (ALICE,)}, "GPU 0 is used by pid 4242 (python) of alice"),
        (
            {"b": (BusyGpu("0", BOB), BusyGpu("1", BOB)), "a": (ALICE,)},
            "GPU 0 of a is used by pid 4242 (python) of alice; GPUs 0, 1 of b are kept for run digits-7 of bob",
        ),
        ({"a": (BusyGpu("0", [GpuHolder(9), *BOB]),)}, "GPU 0 of a is used by pid 9"),
        ({"a": (BusyGpu("0", [GpuHolder(run=UNKNOWN_RUN)]),)}, "GPU 0 of a is kept for another run"),
        (
            {f"n{number}": (ALICE,) for number in range(10)},
            "; ".join(f"GPU 0 of n{number} is used by pid 4242 (python) of alice" for number in range(SHOWN))
            + "; and 2 more",
        ),
    ],
)
def test_the_message_about_busy_gpus_names_their_users(lacking: Mapping[str, tuple[BusyGpu, ...]], text: str) -> None:
    assert render_busy_gpus({node: NodeBusy(node, gpus) for node, gpus in lacking.items()}) == text
