"""How far the program's folder has been sent is shown for each node: bytes, rate and the time left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.console.messages import REMIND_S, TRANSFER_REMIND_S, Reminder
from launcher.controller.bundle import SHOWN_NODES, WINDOW_S, Transfer, Transfers
from launcher.controller.inbox import Observer
from launcher.controller.requests import ProfileRequests, StackRequests
from launcher.gang.decide import decide
from launcher.gang.events import NodeReady, Tick
from launcher.rundir.directory import RunDir
from tests.harness.builders.gang import TWO_NODES, make_policy, play
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.messages import Fetch
from worker_entry.protocol.orders import Piece

MIB = 1 << 20


def ask(left: int) -> Fetch:
    return Fetch(0, 0, MIB, left * MIB)


def sending(rate: int, total: int, seconds: int, node: str = "gpu-a") -> Transfers:
    """Requests for `rate` MiB per second, one MiB each."""
    transfers = Transfers()
    for number in range(seconds * rate + 1):
        transfers.note(node, ask(total - number), number / rate)
    return transfers


def test_a_transfer_shows_bytes_rate_and_time_left() -> None:
    assert sending(10, 300, 12).render() == "gpu-a 120 MiB of 300 MiB, 10 MiB/s, 18.0 s left"
    assert sending(1, 300, 0).render() == "gpu-a 0 B of 300 MiB"


def test_the_transfer_rate_covers_only_the_last_seconds() -> None:
    transfers = sending(10, 1000, 30)
    for second in range(1, 2 * int(WINDOW_S)):
        transfers.note("gpu-a", ask(700 - second), 30.0 + second)
    assert transfers.render() == "gpu-a 319 MiB of 1,000 MiB, 1 MiB/s, 11 min 21 s left"


def test_the_slowest_transfers_are_listed_first_and_the_rest_is_counted() -> None:
    transfers = Transfers()
    for number in range(SHOWN_NODES + 2):
        for sent in range(number + 1):
            transfers.note(f"gpu-{number}", ask(100 - sent), float(sent))
    shown = transfers.render()
    assert shown.startswith("gpu-0 0 B of 100 MiB; gpu-1 1 MiB of 100 MiB, 1 MiB/s, 99.0 s left; gpu-2 2 MiB of ")
    assert shown.endswith("; and 2 more")


def test_a_node_that_has_all_files_is_no_longer_listed() -> None:
    transfers = sending(1, 10, 3)
    transfers.end("gpu-a")
    assert transfers.render() == ""
    assert transfers.current == {}


def test_a_piece_requested_again_after_a_reconnect_is_not_counted_twice() -> None:
    transfers = sending(1, 10, 3)
    transfers.note("gpu-a", ask(9), 4.0)
    assert transfers.current["gpu-a"] == Transfer(1 * MIB, 10 * MIB, MIB / 4)


def test_each_file_request_produces_a_tick(tmp_path: Path) -> None:
    """Otherwise, a queue that is never empty would leave no time for reminders."""
    timing = SimpleNamespace(monotonic=lambda: 1.0)
    links = SimpleNamespace(
        next=lambda _: ("gpu-a", ask(3)), send=lambda *_: None, frame=1, clock_offset_s=lambda _: 0.0, timing=timing
    )
    bundle = SimpleNamespace(read_piece=lambda _: (Piece(0, 0, 0), b""))
    files = RunDir.create(tmp_path / "run")
    collector = SimpleNamespace(note=lambda *_: False)
    context: Any = SimpleNamespace(
        links=links, bundle=bundle, collector=collector, files=files, timing=timing, input=None, console=None
    )
    observer = Observer(context, 1, None, StackRequests(context), ProfileRequests(context))
    assert [*observer.next_events(1.0)] == [Tick()]
    assert observer.transfers.current == {"gpu-a": Transfer(0, 3 * MIB, 0.0)}


def test_the_progress_of_transfers_is_shown_every_ten_seconds() -> None:
    policy = replace(make_policy(TWO_NODES), syncs=frozenset("ab"))
    state, _ = play(policy, NodeReady("a"))
    state, _ = decide(state, NodeReady("b"), 0.0)
    reminder = Reminder(0.0, sending(10, 300, 12).render)
    lines = {now: line for now in range(60) if (line := reminder.remind(state, float(now), 0.0))}
    assert [*lines] == [int(REMIND_S + TRANSFER_REMIND_S * number) for number in range(6)]
    assert set(lines.values()) == {"Sending files: gpu-a 120 MiB of 300 MiB, 10 MiB/s, 18.0 s left"}
    silent = Reminder(0.0)
    assert silent.remind(state, REMIND_S, 0.0) == "Syncing, 5 s: waiting for a, b"
