"""A pipe or a file on distlaunch's stdin reaches the tasks that read it completely, and again after a restart."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.controller.task_input import AHEAD_BYTES, PART_BYTES, TaskInput
from launcher.plan.paths import RunPaths
from tests.harness.apart import linux
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.processes.stdin import run
from tests.harness.processes.warm_python import WarmPython
from tests.harness.terminals import terminal
from tests.harness.witness import wait_until
from worker_entry.agent.tasks.input import TaskInput as Pipe
from worker_entry.protocol.messages import AskInput
from worker_entry.protocol.orders import Input

COVERS = (
    "launcher/controller/task_input.py",
    "worker_entry/agent/tasks/input.py",
    "worker_entry/agent/tasks/task.py",
    "worker_entry/task/forkserver.py",
)

READ = "import os, sys; print(os.environ['DISTLAUNCH_TASK'], len(sys.stdin.buffer.read()))\n"


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ((), [300_000, 0]),
        (("--set", "stdin=all"), [300_000, 300_000]),
        (("--set", "stdin=none"), [0, 0]),
    ],
    ids=["chief", "all", "none"],
)
def test_piped_stdin_reaches_the_chief_all_tasks_or_none_as_configured(
    tmp_path: Path, options: tuple[str, ...], sizes: list[int]
) -> None:
    (tmp_path / "program.py").write_text(READ)
    expected = [f"worker:{number} {size}" for number, size in enumerate(sizes)]
    assert run(tmp_path, "-n", "2", *options, "program.py", data=os.urandom(300_000)) == expected
    spool = tmp_path / "run" / "stdin"
    assert spool.exists() == (max(sizes) > 0)
    if spool.exists():
        assert spool.stat().st_mode & 0o777 == 0o600


def test_a_file_on_stdin_reaches_a_command(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"one\ntwo\n")
    with (tmp_path / "data").open("rb") as file:
        assert run(tmp_path, "-n", "1", "--", "sort", "-r", stdin=file) == ["one", "two"]


def test_a_task_has_dev_null_as_stdin_if_distlaunch_has_no_input(tmp_path: Path) -> None:
    program = "import os; print(os.stat(0).st_rdev == os.stat('/dev/null').st_rdev)"
    (tmp_path / "program.py").write_text(program)
    assert run(tmp_path, "-n", "1", "program.py") == ["True"]


@pytest.mark.slow
def test_a_task_does_not_read_from_the_terminal(tmp_path: Path) -> None:
    script = "readlink /dev/fd/0; read x; echo over"
    command = distlaunch_command("local", "-n", "1", "--run-dir", "run", "--", "sh", "-c", script)
    with terminal(command, cwd=tmp_path) as shown:
        shown.shows("worker:0 │ /dev/null", "worker:0 │ over")
        assert shown.end() == 0
    assert not (tmp_path / "run" / "stdin").exists()


@pytest.mark.slow
def test_stdin_lines_arrive_immediately_and_a_restarted_task_reads_them_again(tmp_path: Path) -> None:
    script = "while read line; do echo $line; done; echo end; [ $DISTLAUNCH_ATTEMPT = 2 ]"
    command = distlaunch_command(
        "local", "-n", "1", "--max-restarts", "1", "--run-dir", str(tmp_path / "run"), "--", "sh", "-c", script
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"first", b"second"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline().split()[-1] == word
        process.stdin.close()
        rest = [line.split()[-1] for line in process.stdout]
        assert process.wait(60) == 0
    assert rest == [b"end", b"first", b"second", b"end"]


@pytest.mark.slow
def test_stdin_is_read_only_a_bounded_amount_ahead(tmp_path: Path) -> None:
    read, write = os.pipe()
    place = ("--run-dir", str(tmp_path / "run"))
    command = distlaunch_command("local", "-n", "1", *place, "--", "sh", "-c", "read x; sleep 1")
    with subprocess.Popen(["yes"], stdout=write) as source:
        os.close(write)
        subprocess.run(command, stdin=read, capture_output=True, check=True, timeout=60)
        os.close(read)
        assert source.wait(20) == -signal.SIGPIPE
    # The first byte of the second part is already in the task's pipe.
    assert (tmp_path / "run" / "stdin.partial").stat().st_size <= AHEAD_BYTES + 2 * PART_BYTES


@pytest.mark.slow
def test_a_run_in_the_background_passes_stdin_to_its_task(tmp_path: Path) -> None:
    command = distlaunch_command("local", "-d", "-n", "1", "--run-dir", str(tmp_path / "later"), "--", "sort")
    subprocess.run(command, input=b"b\na\n", capture_output=True, check=True, timeout=60)
    log = tmp_path / "later" / "attempt-1" / "worker-0.log"
    wait_until(lambda: log.exists() and log.read_bytes() == b"a\nb\n", "the task has read everything")


@linux
@pytest.mark.slow
@pytest.mark.tensorflow
def test_forked_tasks_read_stdin(warm_python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, tensorflow\nprint('read', sys.stdin.readline().strip(), input(), sys.stdin.read())\n"
    )
    options = ("--set", "stdin=all", "--run-dir", str(tmp_path / "run"))
    command = warm_python.command("local", "-n", "2", *options, "program.py")
    done = subprocess.run(command, cwd=tmp_path, input=b"1\n2\n3", capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for number in range(2):
        assert b"read 1 2 3\n" in (tmp_path / "run" / "attempt-1" / f"worker-{number}.log").read_bytes()


def test_eof_on_stdin_of_a_worker_is_explained(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("input()\n")
    ran = distlaunch("local", "-n", "2", "program.py", cwd=tmp_path)
    assert "only the chief reads stdin, from a pipe or a file" in ran.stderr


# --- the two ends ---


def make_input(folder: Path, source: int | None) -> tuple[TaskInput, list[object], list[str]]:
    said: list[str] = []
    woken: list[object] = []
    return TaskInput(RunPaths(folder), source, woken.append, said.append), woken, said


def test_a_request_for_stdin_is_answered_when_data_arrives(tmp_path: Path) -> None:
    read, write = os.pipe()
    given, woken, _ = make_input(tmp_path, read)
    assert [*given.answer("local", AskInput("worker:0", 0))] == []
    os.write(write, b"abc")
    wait_until(lambda: bool(woken), "it wakes the run")
    assert [*given.arrived()] == [("local", Input("worker:0", 0, 3, False), b"abc")]
    assert [*given.answer("far", AskInput("worker:1", 1))] == [("far", Input("worker:1", 1, 2, False), b"bc")]
    assert [*given.answer("local", AskInput("worker:0", 3))] == []
    os.close(write)
    wait_until(lambda: (tmp_path / "stdin").exists(), "it has read the end")
    eventually(lambda: check_last(given))


def check_last(given: TaskInput) -> None:
    assert [*given.answer("local", AskInput("worker:0", 3))] == [("local", Input("worker:0", 3, 0, True), b"")]


def test_a_new_controller_passes_on_the_stdin_that_its_predecessor_read(tmp_path: Path) -> None:
    (tmp_path / "stdin").write_bytes(b"abc")
    given, _, said = make_input(tmp_path, None)
    assert [*given.answer("local", AskInput("worker:0", 0))] == [("local", Input("worker:0", 0, 3, True), b"abc")]
    assert said == []
    (tmp_path / "stdin").rename(tmp_path / "stdin.partial")
    given, _, said = make_input(tmp_path, None)
    assert [*given.answer("local", AskInput("worker:0", 3))] == [("local", Input("worker:0", 3, 0, True), b"")]
    assert said == ["the last controller has not read all of its stdin; for the tasks, it ends early"]


def test_an_agent_ignores_repeated_and_unrequested_parts_of_stdin() -> None:
    asked: list[Any] = []
    with selectors.DefaultSelector() as selector:
        pipe = Pipe("worker:0", selector, asked.append)
        reader = os.dup(pipe.reader)
        pipe.begin()
        pipe.ask()  # over a new connection
        assert asked == [AskInput("worker:0", 0)] * 2
        for part, body in (
            (Input("worker:0", 9, 1, False), b"x"),
            (Input("worker:0", 0, 3, False), b"abc"),
            (Input("worker:0", 0, 3, False), b"abc"),
            (Input("worker:0", 3, 1, True), b"d"),
            (Input("worker:0", 3, 1, True), b"d"),
        ):
            pipe.take(part, body)
            for key, _ in selector.select(0):
                key.data()
        assert asked[2:] == [AskInput("worker:0", 3)]
        assert os.read(reader, 100) == b"abcd"
        assert os.read(reader, 100) == b""
        os.close(reader)


def test_an_agent_requests_no_more_stdin_for_a_task_that_closed_it() -> None:
    asked: list[Any] = []
    with selectors.DefaultSelector() as selector:
        pipe = Pipe("worker:0", selector, asked.append)
        pipe.begin()
        pipe.take(Input("worker:0", 0, 3, False), b"abc")
        for key, _ in selector.select(0):
            key.data()
        assert not selector.get_map()
        pipe.take(Input("worker:0", 3, 1, False), b"d")
        pipe.close()
    assert len(asked) == 1
