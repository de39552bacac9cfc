"""Goodput: each second of a run is counted once, and as the right kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.controller.goodput import count_recorded
from launcher.gang.state import Phase
from launcher.report.run_events import (
    State,
    parse_record,
)
from tests.harness.builders.goodput import (
    seconds_of,
)
from tests.sim.nodes import KILL, At, Exit, FakeAgent, FakeRun, Script, Steps, lose

COVERS = ("launcher/report", "launcher/controller/goodput.py")


# --- whole runs ---


RETURN = {"restart": {"max_restarts": 1, "return_s": 600}}


def lose_later(agent: FakeAgent) -> bool:
    """Loses the node after 40 s."""
    agent.world.timing.after(40.0, lambda: agent.lose("cable pulled", None))
    return True


WHOLE: dict[str, tuple[Script, dict[str, Any]]] = {
    "succeeds": ([Steps("worker:0", 1, 1), Steps("worker:0", 1, 50, 30.0)], {}),
    "restarts": (
        [
            *[Steps("worker:0", 1, 1 + n, 5.0 + n) for n in range(20)],
            Exit("worker:1", KILL, 30.0),
            *[Steps("worker:0", 11, 11 + n, 5.0 + n, attempt=2) for n in range(20)],
            Exit("worker:1", KILL, 30.0, 2),
            Steps("worker:0", 25, 25, attempt=3),
        ],
        {"restart": {"max_restarts": 2}},
    ),
    "loses a node": ([Steps("worker:0", 1, 1), Steps("worker:0", 1, 9, 30.0), At(Phase.RUNNING, lose_later)], RETURN),
}


@pytest.mark.parametrize("name", WHOLE)
def test_goodput_counted_from_recorded_files_equals_the_reported_goodput(tmp_path: Path, name: str) -> None:
    script, spec = WHOLE[name]
    run = FakeRun(tmp_path / "run", script, spec, recover=30 if name == "loses a node" else None)
    report = run.run()
    assert report.goodput is not None
    assert report.goodput.training_s > 10
    assert (report.goodput.lost_s > 10) == (name == "restarts")
    again = count_recorded(run.files, report.started, run.spec).count(report.ended)
    assert seconds_of(again) == seconds_of(report.goodput)


def test_goodput_counts_waiting_for_a_node_separately(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", [At(Phase.RUNNING, lose("cable pulled"))], RETURN, recover=30)
    report = run.run()
    records = map(parse_record, run.files.events.read_bytes().splitlines())
    states = [(record.event.state, record.time) for record in records if record and isinstance(record.event, State)]
    assert [state for state, _ in states[3:7]] == ["stopping", "waiting", "restarting", "connecting"]
    assert report.goodput is not None
    assert report.goodput.waiting_s == pytest.approx(states[5][1] - states[4][1], abs=1e-5)
    assert report.goodput.waiting_s > 50
