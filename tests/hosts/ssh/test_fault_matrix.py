"""If a process of a run dies, hangs or is stopped, the run ends in time with a reason and leaves no process.

These are some cells of `fault_matrix`; `python -m tests.benchmarks faults` plays every cell several times.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness.apart import linux
from tests.harness.hosts.sshd import skip_without_openssh
from tests.harness.processes.fault_matrix import Cell, Phase, Where, Who, all_cells, play

COVERS = (
    "launcher/gang",
    "launcher/controller/supervisor.py",
    "launcher/controller/attempt.py",
    "worker_entry/agent",
    "worker_entry/system",
)

pytestmark = linux

STOP = signal.SIGSTOP

CHOSEN: list[tuple[Where, Who, signal.Signals, Phase]] = [
    ("local", "guardian", STOP, "training"),
    ("ssh", "reattachment", STOP, "forming"),
]


@pytest.mark.parametrize("cell", [Cell(*cell) for cell in CHOSEN], ids=str)
def test_a_fault_ends_a_run_as_expected_and_leaves_no_process(cell: Cell, tmp_path: Path) -> None:
    if cell.where == "ssh":
        skip_without_openssh()
    play(cell, tmp_path)


def test_the_tested_cells_exist_in_the_fault_matrix() -> None:
    assert {Cell(*cell) for cell in CHOSEN} < {*all_cells()}
