"""A port that unknown peers can reach is reported once it is open, and not before."""

from __future__ import annotations

from launcher.gang.decide import decide
from launcher.gang.events import Event, NodePrepared, NodeReady, TaskListening, TaskUnguarded
from launcher.gang.unknown_peers import render_news_of_guards, render_unguarded
from tests.harness.builders.gang import ONE_NODE, W0, W1, make_policy, play, ports_of, started

WHY = "PyTorch does not share it"


def test_an_unprotected_port_is_reported_only_once_it_is_open() -> None:
    policy = make_policy(ONE_NODE)
    prepared = NodePrepared("a", ports_of(policy, "a"), {W0: WHY, W1: WHY})
    state, _ = play(policy, NodeReady("a"))
    lines: list[str] = []
    events: list[Event] = [prepared, *started(W0, W1), TaskListening(W0, 1001.0)]
    for event in events:
        state, _ = decide(state, event, 0.0)
        lines += render_news_of_guards(state, event)
    assert lines == [f"anyone can reach the port of worker:0: {WHY}"]


def test_an_open_port_that_loses_its_protection_is_reported() -> None:
    policy = make_policy(ONE_NODE)
    state, _ = play(policy, NodeReady("a"), NodePrepared("a", ports_of(policy, "a")), *started(W0, W1))
    lost = TaskUnguarded(W1, "it listens again")
    early, _ = decide(state, lost, 0.0)
    assert render_news_of_guards(early, lost) == []
    assert early.unguarded == {W1: "it listens again"}
    state, _ = decide(state, TaskListening(W1, 1001.0), 0.0)
    assert render_news_of_guards(decide(state, lost, 0.0)[0], lost) == [
        "anyone can reach the port of worker:1: it listens again"
    ]


def test_several_unprotected_ports_are_reported_in_one_line() -> None:
    assert render_unguarded({W0: WHY, W1: WHY}) == [f"anyone can reach the ports of worker:0, worker:1: {WHY}"]
