"""`distlaunch logs`: which lines it shows, in which order, and what it does with hostile ones."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.rundir import follow
from launcher.rundir.follow import NAMES, STAT_S, FileWatch
from launcher.rundir.journal_reading import JournalReader, read_last_lines
from tests.harness.apart import linux
from tests.harness.builders.run_folders import RunFolder
from tests.harness.polling import eventually
from tests.harness.processes.background import BackgroundRun
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.in_process import run_here_bytes
from tests.harness.rules.second_chance import assert_same_bytes

COVERS = (
    "launcher/commands",
    "launcher/commands/logs.py",
    "launcher/rundir/logs.py",
    "launcher/rundir/log_tails.py",
    "worker_entry/agent/tasks/attempt.py",
    "worker_entry/agent/tasks/log.py",
)

T = 1_700_000_000.0
"""2023-11-14T22:13:20Z."""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def logs(run: RunFolder, *options: str, status: int = 0) -> str:
    return logs_bytes(run, *options, status=status).decode()


def logs_bytes(run: RunFolder, *options: str, status: int = 0) -> bytes:
    done = run_here_bytes("logs", str(run.root), *options)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def lines(text: str) -> list[str]:
    """The lines without their labels."""
    return [line.partition(" │ ")[2] for line in text.splitlines()]


class Follower:
    """`distlaunch logs -f`, whose output goes to a file."""

    def __init__(self, run: Path, folder: Path, *options: str) -> None:
        self._output = folder / "followed"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                distlaunch_command("logs", str(run), "-f", *options), stdout=output, stderr=subprocess.PIPE
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def shows(self, text: str) -> None:
        def check() -> None:
            assert text in self.text

        eventually(check)

    def end(self) -> str:
        """Waits for the end of the command; returns all output."""
        return self.end_bytes().decode()

    def end_bytes(self) -> bytes:
        _, errors = self.process.communicate(timeout=60)
        assert (self.process.returncode, errors) == (0, b"")
        return self._output.read_bytes()


# --- which lines ---


def test_logs_merge_tasks_by_line_time(run: RunFolder) -> None:
    run.write("worker:0", [(T + 1, "a"), (T + 4, "d"), (T + 5, "e")])
    run.write("worker:1", [(T + 2, "b"), (T + 3, "c"), (T + 5, "f"), (T + 6, b"no line break")])
    run.write("tensorboard:0", [(T, "auxiliary")])
    shown = logs(run)
    assert shown.splitlines()[0] == "worker:0 │ a"
    assert shown.splitlines()[-1] == "worker:1 │ no line break"
    assert lines(shown) == ["a", "b", "c", "d", "e", "f", "no line break"]


def test_logs_never_split_a_line_and_use_the_time_of_its_end(run: RunFolder) -> None:
    run.write("worker:0", [(T + 1, b"one "), (T + 3, "line")])
    run.write("worker:1", [(T + 2, "between")])
    assert lines(logs(run)) == ["between", "one line"]


def test_logs_show_a_log_without_an_index_in_one_block(run: RunFolder) -> None:
    run.write("worker:0", [(T + 1, "a"), (T + 3, "c")])
    run.write("worker:1", [(0, "x"), (0, "y")], indexed=False)
    assert lines(logs(run)) == ["x", "y", "a", "c"]
    assert [json.loads(line)["time"] for line in logs(run, "--json").splitlines()] == [None, None, T + 1, T + 3]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["worker:1"], ["w1"]),
        (["worker-1"], ["w1"]),
        (["worker"], ["w0", "w1"]),
        (["chief", "worker:0"], ["c0", "w0"]),
        (["tensorboard"], ["t0"]),
        ([], ["c0", "w0", "w1"]),
    ],
)
def test_logs_select_tasks_by_type_and_index(run: RunFolder, words: list[str], shown: list[str]) -> None:
    for number, task in enumerate(("chief:0", "worker:0", "worker:1", "tensorboard:0")):
        run.write(task, [(T + number, f"{task[0]}{task[-1]}")])
    assert lines(logs(run, *words)) == shown


def test_logs_show_the_last_attempt_unless_another_is_given(run: RunFolder) -> None:
    for attempt in (1, 2, 10):
        run.write("worker:0", [(T + attempt, f"attempt {attempt}")], attempt=attempt)
    assert lines(logs(run)) == ["attempt 10"]
    assert lines(logs(run, "--attempt", "2")) == ["attempt 2"]
    assert "no attempt 3: the last one is 10" in logs(run, "--attempt", "3", status=2)


def test_logs_head_and_tail_count_lines_per_task(run: RunFolder) -> None:
    run.write("worker:0", [(T + n, f"a{n}") for n in range(0, 20_000, 2)])
    run.write("worker:1", [(T + n, f"b{n}") for n in range(1, 9, 2)] + [(T + 20_001, b"end")])
    assert lines(logs(run, "--tail", "2")) == ["b7", "a19996", "a19998", "end"]
    assert lines(logs(run, "--head", "2")) == ["a0", "b1", "a2", "b3"]
    assert lines(logs(run, "worker:1", "--tail", "99")) == ["b1", "b3", "b5", "b7", "end"]
    assert (logs(run, "--tail", "0"), logs(run, "--head", "0")) == ("", "")
    assert "--head" in logs(run, "--head", "1", "-f", status=2)


def test_logs_since_accepts_a_duration_or_a_time(run: RunFolder) -> None:
    now = time.time()
    run.write("worker:0", [(now - 7200, "old"), (now - 60, b"new "), (now - 50, "line"), (now - 1, "newest")])
    run.write("worker:1", [(now - 7200, "old")], indexed=False)
    os.utime(run.log("worker:1"), (now - 7200, now - 7200))
    assert lines(logs(run, "--since", "1h")) == ["new line", "newest"]
    assert lines(logs(run, "--since", "1h", "--tail", "1")) == ["newest"]
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 30))
    assert lines(logs(run, "--since", moment)) == ["newest"]
    assert lines(logs(run, "--since", "3h")) == ["old", "old", "new line", "newest"]
    assert "--since: expected a duration such as 10m, or a time such as 2026-11-22T14:30, not 10 [usage]" in logs(
        run, "--since", "10", status=2
    )


def test_logs_report_missing_logs_and_unknown_tasks(run: RunFolder) -> None:
    assert "has a log" in logs(run, status=2)
    run.write("worker:0", [(T, "a")])
    assert "no log of worker:7" in logs(run, "worker:7", status=2)
    assert "no log of chief" in logs(run, "chief", status=2)
    assert "'wroker' is not a task" in logs(run, "wroker", status=2)


# --- formats ---


def test_logs_show_or_omit_times_and_task_names(run: RunFolder) -> None:
    run.write("worker:0", [(T + 0.1234, "a")])
    run.write("worker:1", [(T + 1, "b")])
    assert logs(run, "-t").splitlines()[0] == "worker:0 │ 2023-11-14T22:13:20.123Z a"
    assert logs(run, "-t", "--no-prefix").splitlines() == ["2023-11-14T22:13:20.123Z a", "2023-11-14T22:13:21.000Z b"]
    assert logs(run, "--no-prefix") == "a\nb\n"
    assert [json.loads(line) for line in logs(run, "--json").splitlines()] == [
        {"time": pytest.approx(T + 0.1234, abs=1e-5), "task": "worker:0", "line": "a"},
        {"time": T + 1, "task": "worker:1", "line": "b"},
    ]


HOSTILE = b"\x1b]0;title\x07\x1b[2J\rover\x9b2J \xff\xfe bidi\xe2\x80\xae \x1b[31mred\x1b[0m"


def test_logs_without_a_prefix_write_unchanged_bytes_to_a_pipe(run: RunFolder) -> None:
    text = HOSTILE + b"\n\n" + os.urandom(100_000) + b"\nend"
    whole = run.write("worker:0", [(T, text)])
    assert logs_bytes(run, "worker:0", "--no-prefix") == whole
    assert logs_bytes(run, "--no-prefix") == whole + b"\n"
    assert logs_bytes(run, "worker:0", "--no-prefix", "--tail", "1") == b"end"


@pytest.mark.parametrize("options", [[], ["--no-prefix"], ["-t"], ["--json"], ["--distlaunch"]], ids=str)
def test_logs_neutralize_control_sequences_on_a_terminal(run: RunFolder, options: list[str]) -> None:
    run.write("worker:0", [(T, HOSTILE + b"\n")])
    run.say(T, HOSTILE.decode("utf-8", "surrogateescape"))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        distlaunch_command("logs", str(run.root), *options),
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
    )
    assert process.wait(60) == 0
    os.close(slave)
    shown = os.read(master, 65_536)
    os.close(master)
    assert b"bidi" in shown
    assert b"\x1b" not in shown
    assert b"\x07" not in shown
    assert "\x9b" not in shown.decode()
    assert "\u202e" not in shown.decode()


def test_logs_ignore_files_that_are_not_logs_of_tasks(run: RunFolder) -> None:
    run.write("worker:0", [(T, "a")])
    folder = run.log("worker:0").parent
    for name in ("\x1b[2J.log", "worker-00.log", "worker-x.log", "worker-1.log.index", "x.txt"):
        (folder / name).write_text("x")
    (folder / "worker-2.log").mkdir()
    os.mkfifo(folder / "worker-3.log")
    assert lines(logs(run)) == ["a"]


def test_logs_end_silently_when_their_pipe_is_closed(run: RunFolder, tmp_path: Path) -> None:
    run.write("worker:0", [(T, b"line\n" * 1_000_000)])
    for options in ([], ["--no-prefix"], ["--json"], ["-f", "--no-prefix"]):
        process = subprocess.Popen(
            distlaunch_command("logs", str(run.root), "worker:0", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4)
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (141, b"")


# --- distlaunch's messages ---


def test_logs_of_distlaunch_come_from_the_journal(run: RunFolder) -> None:
    run.say(T, "Starting", attempt=0)
    run.append({"time": T, "attempt": 1, "event": "state", "state": "running"})
    run.say(T + 1, "first\nsecond", level="error")
    run.append({"time": T, "attempt": 1, "event": "of-the-future", "x": [1]})
    (run.root / "events.jsonl").open("a").write('garbage\n[1]\n{"event": "said"}\n{"time": 1, "event": "sa')
    assert logs(run, "--distlaunch") == "Starting\nfirst\nsecond\n"
    assert logs(run, "--distlaunch", "--tail", "1", "-t").splitlines() == [
        "2023-11-14T22:13:21.000Z first",
        "2023-11-14T22:13:21.000Z second",
    ]
    assert logs(run, "--distlaunch", "--attempt", "1", "--head", "1") == "first\nsecond\n"
    assert json.loads(logs(run, "--distlaunch", "--json").splitlines()[0]) == {
        "time": T,
        "task": None,
        "level": "note",
        "line": "Starting",
    }
    assert "leave out worker:0" in logs(run, "worker:0", "--distlaunch", status=2)


def test_a_growing_journal_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = JournalReader(path)
    assert [*reader.read()] == []
    entries = [{"time": float(number), "attempt": 1, "event": "said", "text": "ä" * number} for number in range(20)]
    data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    got = []
    with path.open("ab", buffering=0) as file:
        for place in range(0, len(data), 37):
            file.write(data[place : place + 37])
            got += [*reader.read()]
    assert [line.facts for line in got] == entries
    last, follows = read_last_lines(path, 300)
    assert [line.facts for line in last] == entries[-len(last) :]
    assert 0 < len(last) < len(entries)
    with path.open("ab") as file:
        file.write(json.dumps(entries[0]).encode() + b"\n")
    assert [line.facts for line in follows.read()] == entries[:1]


# --- following ---


@pytest.mark.parametrize("options", [[], ["worker:0", "--no-prefix"]], ids=["merged", "one"])
def test_logs_follow_a_truncated_log_from_its_new_beginning(tmp_path: Path, options: list[str]) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "before it was cut")])
    follower = Follower(run.root, tmp_path, *options)
    follower.shows("before")
    os.truncate(run.log("worker:0"), 0)
    follower_sees_the_cut = run.log("worker:0")
    run.write("worker:0", [(T + 1, "after")])
    follower.shows("after")
    assert follower_sees_the_cut.read_bytes() == b"after\n"
    run.note(ended=True)
    assert [line.partition(" │ ")[2] or line for line in follower.end().splitlines()] == ["before it was cut", "after"]


def test_logs_follow_new_tasks_attempts_and_lines_until_the_run_ends(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    follower = Follower(run.root, tmp_path)
    run.write("worker:0", [(T, "first")])
    follower.shows("first")
    run.write("worker:1", [(T, b"a part ")])
    run.write("worker:1", [(T, "and its rest"), (T, b"unfinished")])
    follower.shows("and its rest")
    run.write("worker:0", [(T, "second attempt")], attempt=2)
    follower.shows("second attempt")
    run.write("worker:0", [(T, "last words")], attempt=2)
    run.note(ended=True)
    assert lines(follower.end()) == ["first", "a part and its rest", "unfinished", "second attempt", "last words"]


def test_logs_follow_a_planned_task_before_its_log_exists(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "not this one")])
    (run.root / "plan.json").write_text('{"tasks": [{"task": "worker:0"}, {"task": "worker:1"}]}')
    follower = Follower(run.root, tmp_path, "worker:1", "--no-prefix")
    run.write("worker:1", [(T, b"bytes \xff"), (T, b"and no end")])
    run.note(ended=True)
    assert follower.end_bytes() == b"bytes \xffand no end"
    assert "no log of worker:2" in logs(run, "worker:2", "-f", status=2)


def test_logs_follow_an_earlier_attempt_until_it_ends(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "one")])
    follower = Follower(run.root, tmp_path, "--attempt", "1")
    follower.shows("one")
    run.write("worker:0", [(T, "two")], attempt=2)
    assert lines(follower.end()) == ["one"]


def test_following_logs_ends_when_the_controller_is_gone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "a")])
    gone = subprocess.Popen(["true"])
    gone.wait()
    run.note(ended=False, pid=gone.pid)
    assert lines(Follower(run.root, tmp_path).end()) == ["a"]


def test_following_logs_ends_when_the_pipe_is_closed_without_new_lines(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "a")])
    process = subprocess.Popen(
        distlaunch_command("logs", str(run.root), "-f"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert "a" in process.stdout.readline().decode()
    process.stdout.close()
    assert (process.wait(10), process.stderr.read()) == (141, b"")


def test_an_idle_file_watch_checks_files_at_most_once_a_second(tmp_path: Path) -> None:
    """Writing the status file of a task is not a change."""
    run = RunFolder(tmp_path / "run")
    run.write("worker:0", [(T, "a")])
    log = run.log("worker:0")
    watch = FileWatch(*NAMES)
    assert watch.add([run.root, log.parent, log, tmp_path / "missing"])
    assert not watch.add([run.root, log.parent, log])
    (log.parent / "worker-0.status.json").write_text("{}")
    (run.root / "stacks.txt").write_text("")
    began = time.monotonic()
    assert watch.wait() == []
    assert time.monotonic() - began > 0.9 * STAT_S
    watch.close()


@linux
@pytest.mark.parametrize("change", ["log", "new log", "new attempt", "run.json", "key"])
def test_a_file_watch_detects_a_change_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(follow, "STAT_S", 1000.0)
    run = RunFolder(tmp_path / "run")
    run.write("worker:0", [(T, "a")])
    log = run.log("worker:0")
    watch = FileWatch(*NAMES)
    watch.add([run.root, log.parent, log])
    keys, typed = os.pipe()
    changes: dict[str, Callable[[], object]] = {
        "log": lambda: run.write("worker:0", [(T, "b")]),
        "new log": lambda: run.write("worker:1", [(T, "b")]),
        "new attempt": lambda: run.write("worker:0", [(T, "b")], attempt=2),
        "run.json": lambda: run.note(ended=True),
        "key": lambda: os.write(typed, b"q"),
    }
    changes[change]()
    assert watch.wait([keys]) == ([keys] if change == "key" else [])
    watch.close()
    os.close(keys)
    os.close(typed)


@pytest.mark.slow
def test_logs_follow_a_run_through_its_restart_without_losing_a_byte(tmp_path: Path) -> None:
    """Every byte of both attempts of a real run is shown."""
    go = tmp_path / "go"
    program = (
        "for i in 1 2 3; do echo $DISTLAUNCH_ATTEMPT.$i; sleep 0.5; done; printf end; "
        f"until [ -e {go} ]; do sleep 0.05; done; exit 3"
    )
    arguments = ["-n", "2", "--max-restarts", "1", "--", "sh", "-c", program]
    with (tmp_path / "console").open("wb") as console:
        run = BackgroundRun(
            tmp_path,
            "local",
            arguments,
            lambda command, stderr: subprocess.Popen(command, stdout=console, stderr=stderr),
        )
    eventually(lambda: _exists(run.directory / "run.json"))
    raw = Follower(run.directory, tmp_path, "worker:0", "--no-prefix")
    (tmp_path / "merged").mkdir()
    merged = Follower(run.directory, tmp_path / "merged", "--json")
    raw.shows("1.3")
    merged.shows("1.3")
    go.touch()
    assert run.end() == 1
    written = {(attempt, task): run.log(task, attempt) for attempt in (1, 2) for task in (0, 1)}
    assert_same_bytes(raw.end().encode(), written[1, 0] + written[2, 0])
    got = [json.loads(line) for line in merged.end().splitlines()]
    for task in (0, 1):
        lines_of = [entry["line"] for entry in got if entry["task"] == f"worker:{task}"]
        assert lines_of == [*written[1, task].decode().splitlines(), *written[2, task].decode().splitlines()]
    again = subprocess.run(
        distlaunch_command("logs", str(run.directory), "--json", "--attempt", "1"), capture_output=True, check=True
    )
    times = [json.loads(line)["time"] for line in again.stdout.splitlines()]
    assert times == sorted(times)
    assert times[-1] - times[0] > 0.15  # three lines, half a second apart


def _exists(path: Path) -> None:
    assert path.exists()


def test_logs_accept_a_part_of_a_run_name_or_none(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    run = RunFolder(tmp_path / "distlaunch" / "runs" / "20261122-143005-two-nodes-3f9a")
    run.write("worker:0", [(T, "a")])
    for words in ([], ["worker:0"], ["two-nodes"], ["two-nodes", "worker"], [run.root.name, "worker-0"]):
        done = subprocess.run(distlaunch_command("logs", *words), capture_output=True, text=True, env=env, check=True)
        assert done.stdout == "worker:0 │ a\n", words
