"""`ls`, `wait` and RUN: every run is shown as it is, whatever else is in the folder of runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.listing import render_runs
from launcher.errors import UsageError
from launcher.report.journal_line import Line
from launcher.rundir import warm_nodes
from launcher.rundir.directory import RunDir
from launcher.rundir.journal_reading import read_last_lines
from launcher.rundir.owner import this_process
from launcher.rundir.select import list_runs, select_run
from launcher.rundir.summary import RunSummary, replay, summarize
from tests.harness.builders.runs_on_disk import GONE, append_events, write_run
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.in_process import run_here

COVERS = (
    "launcher/commands",
    "launcher/rundir/history.py",
    "launcher/rundir/journal_reading.py",
    "launcher/rundir/names.py",
    "launcher/rundir/queued.py",
    "launcher/rundir/select.py",
    "launcher/rundir/summary.py",
)

OTHER_BOOT = "2f6c1c6e-0000-4000-8000-000000000000"
STEPS = PROGRAMS / "reports_steps.py"
SLEEP = "echo up; sleep 600"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs, which commands use as well; `ls` finds nothing that is kept warm."""
    monkeypatch.setattr(warm_nodes, "find_waiting", lambda: iter(()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "distlaunch" / "runs"


def ask(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    if arguments[0] != "local":
        return run_here(*arguments, cwd=cwd)
    return subprocess.run(
        distlaunch_command(*arguments), cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )


def listed(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask("ls", "--json", *arguments).stdout)
    return found


Start = Callable[[str], "tuple[subprocess.Popen[bytes], str]"]


@pytest.fixture
def start(runs: Path) -> Iterator[Start]:
    """Starts `local -n 1 -- sh -c SCRIPT`, which prints `up` first; returns the process and the run's name."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(script: str) -> tuple[subprocess.Popen[bytes], str]:
        before = set(os.listdir(runs)) if runs.exists() else set()
        command = distlaunch_command("local", "-n", "1", "--", "sh", "-c", script)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        started.append(process)
        assert process.stdout is not None
        assert b"up" in process.stdout.readline()
        [name] = set(os.listdir(runs)) - before
        eventually(lambda: _assert_running(runs / name))  # the first line may come before all ports are checked
        return process, name

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def _assert_running(run: Path) -> None:
    assert summarize(RunDir(run)).state == "running"


@pytest.mark.slow
class TestRealRuns:
    def test_ls_shows_the_state_and_outcome_of_real_runs(self, runs: Path, start: Start) -> None:
        for script in ("exit 0", "exit 7"):
            ask("local", "-n", "1", "--", "sh", "-c", script)
        killed, lost = start(SLEEP)
        killed.kill()
        killed.wait()
        stopped, interrupted = start(SLEEP)
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(60) == 130
        _, running = start(SLEEP)

        found = {run["name"]: run for run in listed("-a")}

        states = sorted((run["state"], run["reference"], run["exit_status"], run["running"]) for run in found.values())
        assert states == [
            ("failed", "task-failed", 1, False),
            ("interrupted", "", 130, False),
            ("lost", "", 3, False),
            ("running", "", None, True),
            ("succeeded", "", 0, False),
        ]
        assert (found[lost]["state"], found[interrupted]["state"]) == ("lost", "interrupted")
        assert [run["name"] for run in listed()] == [running, lost]
        table = ask("ls").stdout.splitlines()
        assert table[0].split() == ["RUN", "STATE", "AGE", "TASKS", "PROGRESS", "RESTARTS"]
        assert table[1].split()[:2] == [running, "running"]
        assert len(ask("ls", "-a").stdout.splitlines()) == 6

    @pytest.mark.smoke
    def test_ls_shows_the_furthest_step_of_a_training_run(self, runs: Path, start: Start) -> None:
        _, name = start(f"exec {sys.executable} -u {STEPS}")

        def shows() -> None:
            row = ask("ls").stdout.splitlines()[1]
            assert row.split(None, 3)[:2] == [name, "running"]
            assert "1/1    epoch 2, step 1,500  0" in row

        eventually(shows)

    @pytest.mark.smoke
    def test_ls_counts_ended_runs_if_no_run_is_running(self, runs: Path) -> None:
        none = ask("ls")
        assert none.stderr == f"There are no runs in {runs}\n"
        write_run(runs / "a", outcome="succeeded")
        write_run(runs / "b", outcome="failed")

        asked = ask("ls")

        assert (asked.returncode, len(asked.stdout.splitlines())) == (0, 1)
        assert asked.stderr == "No run is running; `distlaunch ls -a` lists 2 ended runs\n"

    def test_wait_returns_the_exit_status_of_the_run(self, runs: Path, start: Start) -> None:
        _, name = start("echo up; while [ ! -e $DISTLAUNCH_CHECKPOINT_DIR/end ]; do sleep 0.02; done; exit 7")
        waiting = subprocess.Popen(distlaunch_command("wait"), stdout=subprocess.PIPE, text=True)
        assert [run["state"] for run in listed()] == ["running"]
        assert waiting.poll() is None
        (runs / name / "checkpoints" / "end").touch()

        said, _ = waiting.communicate(timeout=60)

        assert (waiting.returncode, said) == (1, f"{name}: failed (task-failed)\n")
        again = ask("wait", name[:15], "--json")
        assert (again.returncode, json.loads(again.stdout)["name"]) == (1, name)

    def test_wait_ends_with_status_3_if_the_controller_is_lost(self, runs: Path, start: Start) -> None:
        process, name = start(SLEEP)
        waiting = subprocess.Popen(distlaunch_command("wait", name), stdout=subprocess.PIPE, text=True)
        process.kill()
        process.wait()

        said, _ = waiting.communicate(timeout=60)

        assert (waiting.returncode, said) == (3, f"{name}: lost\n")

    def test_down_without_a_name_stops_the_only_running_run(self, runs: Path, start: Start) -> None:
        ask("local", "-n", "1", "--", "true")
        process, name = start(SLEEP)

        assert ask("down").stdout == f"Stopped: {name}\n"
        assert process.wait(60) == 143
        nothing = ask("down")
        assert (nothing.returncode, nothing.stdout) == (2, "")
        assert nothing.stderr.startswith("Error: no run is running [usage]\n")

    def test_ls_lists_a_run_with_a_hanging_controller(self, runs: Path, start: Start) -> None:
        process, name = start(SLEEP)

        def runs_with_its_task() -> None:
            assert [(run["name"], run["state"], run["tasks_up"]) for run in listed()] == [(name, "running", 1)]

        eventually(runs_with_its_task)
        process.send_signal(signal.SIGSTOP)
        try:
            runs_with_its_task()
        finally:
            process.send_signal(signal.SIGCONT)

    def test_a_copied_folder_of_a_running_run_is_lost(self, runs: Path, start: Start) -> None:
        _, name = start(SLEEP)
        shutil.copytree(runs / name, runs / "copy")

        assert {run["name"]: run["state"] for run in listed("-a")} == {name: "running", "copy": "lost"}
        assert select_run(None, running=True).root.name == name

    def test_ls_watch_in_a_pipe_prints_only_changes(self, runs: Path, start: Start) -> None:
        process, name = start(SLEEP)
        watching = subprocess.Popen(distlaunch_command("ls", "-w", "--json"), stdout=subprocess.PIPE)
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.wait(60)
        second = json.loads(watching.stdout.readline())
        watching.stdout.close()

        assert [(run["name"], run["state"]) for run in (first, second)] == [(name, "running"), (name, "interrupted")]
        watching.wait(10)  # its reader has gone


class TestRunState:
    def test_the_state_of_a_run_follows_its_journal(self, runs: Path) -> None:
        files = write_run(runs / "a", tasks=2)
        shown = [summarize(files).shown_state]
        events: list[dict[str, Any]] = [
            {"attempt": 0, "event": "run-started"},
            {"attempt": 0, "event": "state", "state": "connecting"},
            {"attempt": 1, "event": "state", "state": "forming"},
            {"attempt": 1, "event": "task-started", "node": "local", "frame": 3, "task": "worker:0"},
            {"attempt": 1, "event": "task-started", "node": "local", "frame": 4, "task": "worker:1"},
            {"attempt": 1, "event": "state", "state": "running"},
            {"attempt": 1, "event": "task-reported", "task": "worker:0", "progress": {"step": 7}},
            {"attempt": 1, "event": "a-kind-of-tomorrow", "state": ["?"], "progress": 3, "task": {}},
            {"attempt": 1, "event": "task-exited", "node": "local", "frame": 9, "task": "worker:1"},
        ]
        for event in events:
            append_events(files, event)
            shown.append(summarize(files).shown_state)
        last = summarize(files)

        assert shown == ["running"] + ["connecting"] * 2 + ["forming"] * 3 + ["running"] * 4
        assert (last.tasks, last.tasks_up, last.step, last.epoch, last.restarts) == (2, 1, 7, None, 0)
        append_events(files, {"attempt": 2, "event": "state", "state": "restarting"})
        again = summarize(files)
        assert (again.shown_state, again.tasks_up, again.step, again.restarts) == ("restarting", 0, None, 1)
        append_events(files, {"attempt": 2, "event": "state", "state": "waiting"})
        assert summarize(files).shown_state == "waiting"

    def test_a_summary_ignores_an_incomplete_last_line(self, runs: Path) -> None:
        files = write_run(runs / "a")
        append_events(files, {"attempt": 1, "event": "state", "state": "forming"})
        with files.events.open("a") as file:
            file.write('{"attempt": 9, "event": "state", "state": "stopping"}')

        assert summarize(files).state == "forming"
        assert summarize(files).restarts == 0

    def test_the_state_of_a_run_comes_from_the_end_of_its_journal(self, runs: Path) -> None:
        files = write_run(runs / "a", tasks=1)
        started = {"attempt": 3, "event": "task-started", "task": "worker:0"}
        said = {"attempt": 3, "event": "said", "level": "note", "text": "x" * 1000}
        append_events(files, started, *[said] * 400, {"attempt": 3, "event": "state", "state": "stopping"})

        found = summarize(files)

        assert (found.state, found.restarts) == ("stopping", 2)
        assert found.tasks_up is None  # the attempt began before the part that is read

    def test_the_state_of_a_resumed_run_counts_from_its_last_start(self) -> None:
        facts = replay([Line(1.0, 2, "task-started", {"task": "worker:0"}), Line(2.0, 2, "run-started", {})], 1)
        assert (facts.attempt, facts.tasks_up) == (2, 0)

    def test_the_state_of_a_run_names_another_machine_or_container(self, runs: Path) -> None:
        write_run(runs / "a", controller={"host": "gpu-a", "boot": OTHER_BOOT})
        write_run(runs / "b", controller={"pid_namespace": "pid:[1]"})
        places = {run.name: run.shown_state for run in list_runs()}
        assert places == {"a": "running on gpu-a", "b": f"running in another container on {socket.gethostname()}"}

    def test_a_run_from_an_earlier_boot_is_lost(self, runs: Path) -> None:
        assert summarize(write_run(runs / "a", controller={"boot": OTHER_BOOT})).state == "lost"

    def test_the_state_of_an_ended_run_comes_from_run_json(self, runs: Path) -> None:
        found = summarize(write_run(runs / "a", outcome="failed", reference="stalled", exit_status=3))
        assert (found.shown_state, found.exit_status, found.running) == ("failed (stalled)", 3, False)

    def test_the_outcome_comes_from_the_journal_if_run_json_lacks_it(self, runs: Path) -> None:
        files = write_run(runs / "a", controller=GONE)
        end = {"outcome": "failed", "exit_status": 3, "reference": "disk-full", "message": "no space"}
        append_events(files, {"time": 1e9, "attempt": 1, "event": "ended", **end})
        found = summarize(files)
        assert (found.shown_state, found.exit_status, found.ended) == ("failed (disk-full)", 3, 1e9)

    def test_a_run_is_lost_if_only_an_earlier_start_has_ended(self, runs: Path) -> None:
        files = write_run(runs / "a", controller=GONE, started=2e9, generation=1)
        append_events(
            files, {"attempt": 1, "event": "ended", "outcome": "failed"}, {"attempt": 1, "event": "run-started"}
        )
        files.write_json(files.report, {"outcome": "failed", "exit_status": 1, "ended": 1e9})
        assert summarize(files).state == "lost"

    def test_a_run_that_ended_without_a_recorded_outcome_has_no_exit_status(self, runs: Path) -> None:
        files = write_run(runs / "a", outcome="")
        assert (summarize(files).state, summarize(files).exit_status) == ("ended", None)
        assert ask("wait", "a").returncode == 3


class TestRunsFolder:
    def test_listing_runs_ignores_other_files_and_folders(self, runs: Path) -> None:
        write_run(runs / "good", outcome="succeeded")
        (runs / "empty").mkdir()
        (runs / "notes.txt").write_text("mine")
        (runs / "nowhere").symlink_to("/nowhere")
        for name, content in {
            "half": b'{"run_id": "half", "contr',
            "list": b"[1]",
            "deep": b"[" * 100_000,
            "binary": bytes(range(256)),
            "odd": json.dumps({"run_id": 3, "controller": {"pid": "x"}, "ended": False}).encode(),
            "huge": b" " * (2 << 20),
        }.items():
            (runs / name).mkdir()
            (runs / name / "run.json").write_bytes(content)
        (runs / "folder" / "run.json").mkdir(parents=True)
        (runs / "pipe").mkdir()
        os.mkfifo(runs / "pipe" / "run.json")

        assert [run.name for run in list_runs()] == ["good"]
        assert select_run(None).root.name == "good"

    def test_listing_runs_tolerates_runs_with_damaged_files(self, runs: Path) -> None:
        files = write_run(runs / "a")
        files.events.write_bytes(
            b'\xff\n{"time": 1, "attempt": 1, "event": "state"}\n[]\n"x"\n'
            b'{"time": 2, "attempt": "y", "event": "x", "task": []}\n'
        )
        files.plan.write_text("[]")
        ended = write_run(runs / "b", outcome="")
        ended.report.write_text('{"outcome": [], "verdict": 3, "attempts": [[]], "ended": true}')

        assert sorted((run.name, run.state) for run in list_runs()) == [("a", "running"), ("b", "ended")]
        assert len(read_last_lines(files.events, 1 << 20)[0]) == 1

    def test_listing_runs_skips_folders_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They belong to another user, as after a run by sudo."""
        # Root without its capabilities, because another user may not reach this Python.
        stranger = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
        with tempfile.TemporaryDirectory() as state:  # not pytest's folder, which other users cannot enter
            monkeypatch.setenv("XDG_STATE_HOME", state)
            runs = Path(state, "distlaunch", "runs")
            write_run(runs / "theirs", outcome="succeeded").root.chmod(0)
            write_run(runs / "mine", outcome="succeeded").run.chmod(0o644)
            for folder in (runs / "mine", runs, runs.parent, Path(state)):
                folder.chmod(0o755)
            command = [*stranger, *distlaunch_command("ls", "-a", "--json")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            (runs / "theirs").chmod(0o700)
        assert [run["name"] for run in json.loads(done.stdout)] == ["mine"], done.stderr

    def test_listing_runs_works_in_a_read_only_folder(self, runs: Path) -> None:
        files = write_run(runs / "a", outcome="succeeded")
        files.run.chmod(0o400)
        files.root.chmod(0o500)
        runs.chmod(0o500)
        assert [run.name for run in list_runs()] == ["a"]
        runs.chmod(0o700)
        files.root.chmod(0o700)


class TestRunArgument:
    """The argument RUN of commands."""

    @pytest.fixture
    def three(self, runs: Path) -> Path:
        write_run(runs / "20261121-100000-train-aaaa", outcome="succeeded", started=1.0)
        write_run(runs / "20261121-110000-train-bbbb", outcome="failed", reference="stalled", started=2.0)
        write_run(runs / "20261121-120000-eval-cccc", outcome="succeeded", started=3.0)
        return runs

    def test_a_run_is_selected_by_name_or_by_a_unique_part(self, three: Path) -> None:
        for text in ("20261121-110000-train-bbbb", "bbbb", "110000"):
            assert select_run(text).root == three / "20261121-110000-train-bbbb"

    def test_a_run_is_selected_by_the_path_of_its_folder(
        self, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = write_run(tmp_path / "elsewhere", outcome="succeeded")
        monkeypatch.chdir(tmp_path)
        for text in ("./elsewhere", str(elsewhere.root), "elsewhere/"):
            assert select_run(text).root == elsewhere.root
        monkeypatch.chdir(elsewhere.root / "..")
        assert select_run("elsewhere/../elsewhere").root == elsewhere.root.resolve()

    def test_a_partial_run_name_overrides_a_folder_of_that_name(
        self, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "eval").mkdir()
        monkeypatch.chdir(tmp_path)
        assert select_run("eval").root == three / "20261121-120000-eval-cccc"

    def test_an_ambiguous_run_name_lists_its_candidates_latest_first(self, three: Path) -> None:
        with pytest.raises(UsageError) as caught:
            select_run("train")
        assert caught.value.message == "2 runs have 'train' in their names"
        ages = [line.rpartition(", ")[0] for line in caught.value.evidence]
        assert ages == ["20261121-110000-train-bbbb  failed (stalled)", "20261121-100000-train-aaaa  succeeded"]

    def test_a_very_ambiguous_run_name_lists_only_the_latest_candidates(self, runs: Path) -> None:
        for number in range(14):
            write_run(runs / f"run-{number:02}", outcome="succeeded", started=float(number + 1))
        with pytest.raises(UsageError) as caught:
            select_run("run")
        assert len(caught.value.evidence) == 11
        assert caught.value.evidence[0].startswith("run-13 ")
        assert caught.value.evidence[-1] == "and 4 more"

    def test_commands_for_running_runs_prefer_a_running_candidate(self, three: Path) -> None:
        write_run(three / "20261121-130000-train-dddd")
        assert select_run("train", running=True).root.name == "20261121-130000-train-dddd"
        assert select_run("bbbb", running=True).root.name == "20261121-110000-train-bbbb"

    def test_an_omitted_run_is_the_only_running_one_or_the_latest(self, three: Path) -> None:
        assert select_run(None).root.name == "20261121-120000-eval-cccc"
        with pytest.raises(UsageError, match="no run is running"):
            select_run(None, running=True)
        write_run(three / "old", started=0.5)
        for running in (False, True):
            assert select_run(None, running=running).root.name == "old"
        write_run(three / "older", started=0.25)
        for running in (False, True):
            with pytest.raises(UsageError, match="2 runs are running") as caught:
                select_run(None, running=running)
            assert [line.split()[:2] for line in caught.value.evidence] == [["old", "running,"], ["older", "running,"]]

    @pytest.mark.parametrize("text", ["", "zzzz", "./zzzz", "/nowhere/at/all", "x" * 300])
    def test_an_unknown_or_empty_run_name_is_rejected(self, three: Path, text: str) -> None:
        """Also an empty text, which a script's unset variable leaves: `down ""` must not stop the only run."""
        write_run(three / "running")
        for running in (False, True):
            with pytest.raises(UsageError, match="there is no run"):
                select_run(text, running=running)

    def test_an_omitted_run_is_an_error_if_there_are_no_runs(self, runs: Path) -> None:
        with pytest.raises(UsageError, match="there is no run in "):
            select_run(None)


def test_a_run_name_cannot_control_the_terminal_or_break_the_table(runs: Path) -> None:
    write_run(runs / "named", outcome="succeeded").root.rename(runs / "evil\x1b[2J")
    write_run(runs / "分布式", outcome="succeeded")
    table = render_runs(list_runs(), time.time(), ended=True, room=None)
    assert any("evil␛[2J  " in line for line in table)
    assert any(line.startswith("分布式    succeeded") for line in table)


@pytest.mark.parametrize("room", [60, 79, 80, 100, 120, 200])
def test_the_ls_table_fits_the_width_by_omitting_whole_columns(runs: Path, room: int) -> None:
    for number in range(3):
        write_run(
            runs / f"20261122-143005-quite-a-long-name-of-a-run-{number}",
            outcome="failed",
            started=1000.0,
            ended_at=1010.0,
        )
    for ended in (False, True):
        whole, fitting = (render_runs(list_runs(), 2000.0, ended=ended, room=width) for width in (None, room))
        assert max(map(len, fitting)) <= room
        assert set(fitting[0].split()) <= set(whole[0].split())
        assert {line.split()[1] for line in fitting[1:]} == {"failed"}
        assert (fitting == whole) == (max(map(len, whole)) <= room)


def test_ls_shows_the_duration_and_end_of_ended_runs(runs: Path) -> None:
    write_run(runs / "one", outcome="succeeded", started=1000.0, ended_at=1042.0)
    titles, row = render_runs(list_runs(), 1042.0 + 2340, ended=True, room=None)
    assert titles.split() == ["RUN", "STATE", "DURATION", "ENDED", "TASKS", "PROGRESS", "RESTARTS"]
    assert re.split(r"\s{2,}", row)[:4] == ["one", "succeeded", "42 s", "39 min ago"]


def test_ls_watch_on_a_terminal_repaints_until_ctrl_c(runs: Path) -> None:
    import pty

    files = write_run(runs / "watched", controller={"pid": os.getpid(), "started": this_process().started})
    main, side = pty.openpty()
    process = subprocess.Popen(distlaunch_command("ls", "-w"), stdout=side, stderr=side, stdin=side)
    os.close(side)
    seen = b""

    def shows(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(main, 65536)

    shows(b"running")
    append_events(files, {"attempt": 1, "event": "state", "state": "stopping"})
    shows(b"stopping")
    process.send_signal(signal.SIGINT)
    eventually(lambda: _ended(process))
    os.close(main)
    assert process.returncode == 0


def _ended(process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is not None


def test_a_run_summary_round_trips_through_json(runs: Path) -> None:
    found: RunSummary = summarize(write_run(runs / "a", outcome="succeeded"))
    assert json.loads(json.dumps(found.as_json())) == found.as_json()
    assert RunDir(Path(found.directory)).root == runs / "a"
