"""What a later controller reads from the journal of the earlier ones."""

from __future__ import annotations

from pathlib import Path

from launcher.gang.events import NodeAttached
from launcher.report.run_events import NodeMet
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.history import read_history
from tests.harness.builders.preflights import ready
from worker_entry.protocol.frozen import replace

START = RunStart(run_id="x", name="x", started=1.0)


def test_an_agent_of_an_earlier_attempt_is_not_taken_for_one_whose_line_the_journal_has_lost(tmp_path: Path) -> None:
    files = RunDir.create(tmp_path / "run")
    with files.hold(START) as journal:
        journal.begin_attempt(1, {})
        for node in ("kept", "replaced"):
            journal.write(NodeMet(node, ready()))
    with files.hold(replace(START, generation=1)) as journal:
        journal.attempt = 1
        journal.write(NodeAttached("kept"))
        assert read_history(files).ready.keys() == {"kept", "replaced"}
        journal.begin_attempt(2, {})
        journal.note_state("connecting")  # a full disk has lost what follows
    assert read_history(files).ready.keys() == {"kept"}
