"""events.jsonl is complete after every line, and every event is read back as it was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang import events as gang
from launcher.gang.state import AttemptState
from launcher.report.journal_line import Message
from launcher.report.run_events import KINDS, Record, State, kind_of, make_schema, parse_record, render_record
from launcher.rundir.journal import Journal
from launcher.tasks import TaskId
from tests.harness.builders.gang import make_policy
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import wait_until
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Activity, CrashRecord, KerasPatch, Problem, Progress, TaskExit

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
EVENTS: list[gang.Fact] = [
    gang.NodePrepared("gpu-a", {W0: 2222, W1: 2223}),
    gang.NodeRefused("gpu-a", (Problem("no-program", "no train.py", "copy it", task="worker:1"),)),
    gang.NodeLost("gpu-a", "gone"),
    gang.TaskStarted(W0, 77, 5.5),
    gang.LeaderWaits(frozenset({W1})),
    gang.LeaderWaits(None),
    gang.TaskReported(W0, "is training", 3.0, Progress(9, 0, 10, 4.0, 5.0, metrics={"loss": None}), ("kill:worker:0",)),
    gang.TaskReported(W1, "x", 3.0, None, strategy="MirroredStrategy", keras=KerasPatch("3.9", 4)),
    gang.TaskExited(
        W1, TaskExit(signal=9), 7.0, CrashRecord(6.0, "ValueError", "no"), 6.5, Problem("disk-full", "full")
    ),
    gang.StacksReceived({W0: "File …"}, {W0: Activity(1.5, waits=True)}),
    gang.Interrupted(15),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_round_trips_through_the_journal_and_matches_the_schema(event: gang.Fact) -> None:
    record = Record(12.25, 3, event, "gpu-a", 41)
    line = render_record(record)
    assert parse_record(line) == record
    jsonschema.validate(json.loads(line), make_schema())


@pytest.mark.parametrize("event", [gang.Tick(), gang.TaskWrote(W0), gang.StacksAsked(), gang.ProfileAsked(3.0)])
def test_an_event_that_is_never_written_is_not_in_the_schema(tmp_path: Path, event: gang.Event) -> None:
    journal = Journal(tmp_path / "events.jsonl", lambda: 2.0)
    before = AttemptState(make_policy({"local": [W0]}))
    journal.note_event(before, replace(before, signal=15), event, "", 0)
    journal.close()
    kind = kind_of(event)
    assert kind not in [record["event"] for record in map(json.loads, journal_lines(tmp_path))]
    assert kind not in [schema["properties"]["event"]["const"] for schema in make_schema()["anyOf"]]
    assert len(KINDS) == len(make_schema()["anyOf"])


def journal_lines(folder: Path) -> list[bytes]:
    return (folder / "events.jsonl").read_bytes().splitlines()


@given(st.text(), st.floats(0, 2e9), st.integers(0, 99))
def test_any_message_round_trips_through_one_line_of_the_journal(text: str, time: float, attempt: int) -> None:
    record = Record(round(time, 6), attempt, Message("note", text))
    line = render_record(record)
    assert line.count(b"\n") == 1
    assert parse_record(line) == record


def test_the_journal_parser_ignores_unknown_events_and_rejects_incomplete_lines() -> None:
    assert parse_record(b'{"time":1.0,"attempt":1,"event":"later"}\n') is None
    for torn in (
        b"",
        b'{"time":1.0,"att',
        b'"x"',
        b"[1]",
        b'{"event":"said"}',
        b'{"time":false,"attempt":1,"event":"message","level":"note","text":"x"}',
        b'{"time":1' + b"0" * 400 + b',"attempt":1,"event":"message","level":"note","text":"x"}',
        b'{"time":1,"attempt":1,"event":"said"}',
    ):
        with pytest.raises(ValueError, match="not a line of a journal"):
            parse_record(torn)


def records(path: Path) -> list[Record]:
    found = [parse_record(line) for line in path.read_bytes().splitlines()]
    return [record for record in found if record is not None]


def test_the_journal_continues_on_a_new_line_after_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1.0,"att')
    journal = Journal(path, lambda: 2.0)
    journal.say("note", "again")
    journal.close()
    assert parse_record(path.read_bytes().splitlines()[-1]) == Record(2.0, 0, Message("note", "again"))


def test_a_full_disk_loses_only_the_journal_lines_written_meanwhile(tmp_path: Path) -> None:
    """A limit on the file's size stands in for a full disk: the kernel writes a part of a line, then nothing."""
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom launcher.rundir.journal import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "journal = Journal(Path(sys.argv[1]), lambda: 1.0)\njournal.say('note', 'first')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "for _ in range(3): journal.say('note', 'lost')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "journal.say('note', 'last')\n"
    )
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    first, torn, last = path.read_bytes().splitlines()
    assert (parse_record(first), parse_record(last)) == (
        Record(1.0, 0, Message("note", "first")),
        Record(1.0, 0, Message("note", "last")),
    )
    with pytest.raises(ValueError, match="not a line of a journal"):
        parse_record(torn)


def test_the_journal_records_a_restarted_run_in_order(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "-n", "2", "--max-restarts", "1", "--", "sh", "-c", "exit 3")
    told = records(ran.directory / "events.jsonl")
    states = [record.event.state for record in told if isinstance(record.event, State)]
    assert states == ["connecting", "forming", "stopping", "restarting", "connecting", "forming", "stopping", "failed"]
    exits = [(record.attempt, record.event.task) for record in told if isinstance(record.event, gang.TaskExited)]
    assert {*exits} == {(1, W0), (1, W1), (2, W0), (2, W1)}
    assert [record.time for record in told] == sorted(record.time for record in told)
    said = "\n".join(record.event.text for record in told if isinstance(record.event, Message))
    assert said.strip() == ran.stderr.strip()
    ended: Any = told[-1].event
    assert (ended.outcome, ended.exit_status, ended.reference) == ("failed", 1, "task-failed")
    run = json.loads((ran.directory / "run.json").read_text())
    assert (run["ended"], run["outcome"], run["exit_status"], run["reference"]) == (True, "failed", 1, "task-failed")
    assert os.stat(ran.directory / "events.jsonl").st_mode & 0o777 == 0o600


def test_the_journal_of_a_killed_controller_keeps_the_events_so_far(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = distlaunch_command("local", "-n", "1", "--run-dir", str(folder), "--", "sleep", "60")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        journal = folder / "events.jsonl"
        wait_until(lambda: journal.exists() and b"task-started" in journal.read_bytes(), "the task has started")
        process.send_signal(signal.SIGKILL)
    assert [type(record.event).__name__ for record in records(journal)][-1] in ("TaskStarted", "State", "Message")
    assert not json.loads((folder / "run.json").read_text())["ended"]
