"""Ctrl-C affects a program as it does in a terminal (the README compares both), and it ends distlaunch itself."""

from __future__ import annotations

import ast
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import worker_entry
from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.background import BackgroundRun, running
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, wait_until
from worker_entry.protocol.values import TaskExit

COVERS = ("worker_entry/task/signal_handlers.py", "worker_entry/system/processes.py", "launcher/gang/decide.py")

PROGRAM = PROGRAMS / "interrupted.py"
README = Path(worker_entry.__file__).with_name("README.md")
STAYS = "runs on"


def find_ways() -> list[str]:
    """The keys of the program's table."""
    for node in ast.parse(PROGRAM.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("the program has no table")


WAYS = find_ways()


def tell(said: str, how: str) -> str:
    """What the program prints after `ready`, without tracebacks, and how it ends."""
    lines = said.partition("ready\n")[2].splitlines()
    printed = [line for line in lines if line.isascii() and re.fullmatch(r"[a-zA-Z]+( [a-z]+)?", line)]
    return ", ".join([*(line for line in printed if line != "KeyboardInterrupt"), how])


def await_sleep(pid: int) -> None:
    """Waits until the process sleeps: an earlier signal would interrupt its `print`, as the traceback would show."""
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING, "the program waits")


def run_plainly(folder: Path, way: str) -> tuple[str, str]:
    """The program's output, and how it ends."""
    with (
        (folder / "plain").open("wb") as output,
        subprocess.Popen([sys.executable, str(PROGRAM), way], stdout=output, stderr=output) as process,
    ):
        try:
            wait_until(lambda: b"ready\n" in (folder / "plain").read_bytes(), "the program is ready")
            await_sleep(process.pid)
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(8)
                how = str(TaskExit(status) if status >= 0 else TaskExit(signal=-status))
            except subprocess.TimeoutExpired:
                how = STAYS
        finally:
            process.kill()
    return (folder / "plain").read_text(), how


def run_as_task(folder: Path, *words: str) -> tuple[str, str]:
    """The same under distlaunch, as a script or a command."""
    with running(folder, "-n", "1", *words) as run:
        log = wait_until_ready(run)
        await_sleep(run.wait_for_process(0))
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    [task] = run.report["attempts"][0]["tasks"]
    how = TaskExit(task["exit_code"], task["exit_signal"])
    assert task["stopped_by_us"]
    assert run.report["outcome"] == "interrupted"
    assert "Traceback" not in run.said
    assert "Error" not in run.said
    return log.read_text(), str(how)


def read_rows() -> dict[str, str]:
    lines = [line.strip() for line in README.read_text().splitlines()]
    begin = next(number for number, line in enumerate(lines) if line.startswith("| What a program does |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


@linux
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_affects_a_program_as_under_plain_python_and_as_documented(tmp_path: Path, way: str) -> None:
    plain, how_plainly = run_plainly(tmp_path, way)
    ours, how = run_as_task(tmp_path, str(PROGRAM), way)
    if how_plainly == STAYS:
        assert ours.startswith(plain)
    else:
        assert (ours, how) == (plain, how_plainly)  # tracebacks as well
    row = f"| {way} | {tell(plain, how_plainly)} | {tell(ours, how)} |"
    print(row)
    assert read_rows()[way] == row


@linux
@pytest.mark.slow
@pytest.mark.parametrize("way", ["finally", "a handler of SIGINT", "asyncio.run"])
def test_ctrl_c_affects_a_python_command_as_under_plain_python(tmp_path: Path, way: str) -> None:
    assert run_as_task(tmp_path, "--", sys.executable, str(PROGRAM), way) == run_plainly(tmp_path, way)


def test_readme_table_of_ctrl_c_lists_each_program_once() -> None:
    assert [*read_rows()] == WAYS


def wait_until_ready(run: BackgroundRun) -> Path:
    """Returns the log of the only task."""
    log = run.directory / "attempt-1" / "worker-0.log"
    wait_until(lambda: log.exists() and b"ready\n" in log.read_bytes(), "the program is ready")
    return log


GROUP = """
trap 'echo shell' INT
bash -c "trap 'echo child; exit' INT; echo ready; while :; do sleep 0.1; done"
"""


@linux
@pytest.mark.slow
def test_ctrl_c_interrupts_the_process_group_of_a_command(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--", "bash", "-c", GROUP) as run:
        log = wait_until_ready(run)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert log.read_text().split() == ["ready", "child", "shell"]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("way", "noticed"), [("down", True), ("SIGTERM", False), ("SIGHUP", False)])
def test_down_interrupts_tasks_but_sigterm_and_sighup_to_distlaunch_do_not(
    tmp_path: Path, way: str, noticed: bool
) -> None:
    with running(tmp_path, "-n", "1", str(PROGRAM), "finally") as run:
        log = wait_until_ready(run)
        if way == "down":
            subprocess.run(distlaunch_command("down", str(run.directory)), check=True, capture_output=True)
        else:
            run.process.send_signal(signal.Signals[way])
        assert run.end() == 128 + (signal.SIGHUP if way == "SIGHUP" else signal.SIGTERM)
    assert ("finally" in log.read_text()) == noticed


NOTEBOOK = """
import sys
from distlaunch import run_local
try:
    run_local(sys.argv[1], "finally", workers=2, run_dir="run")
except KeyboardInterrupt:
    print("interrupted", flush=True)
print("the kernel stays", sys.stdin.read())
"""


@linux
@pytest.mark.slow
def test_a_notebook_interrupt_stops_the_run_but_not_the_kernel(tmp_path: Path) -> None:
    """A kernel gets SIGINT alone, and the exception of a cell does not end it."""
    mark = make_mark()
    process = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(PROGRAM)],
        cwd=tmp_path,
        env={**os.environ, **mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        logs = [tmp_path / "run" / "attempt-1" / f"worker-{number}.log" for number in range(2)]
        wait_until(lambda: all(log.exists() and b"ready\n" in log.read_bytes() for log in logs), "the tasks run")
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        await_none_left(mark, spare=[process.pid])
        said, _ = process.communicate("for the next cell")
    assert (process.returncode, said) == (0, "the kernel stays for the next cell\n")
    assert all("finally" in log.read_text() for log in logs)


EARLY = """
import os, signal, sys
left = int(sys.argv.pop(1))

def count(event, _):
    global left
    if event == "import":
        left -= 1
        if left == 0:
            open("sent", "w").close()
            os.kill(os.getpid(), signal.SIGINT)

sys.argv[0] = "distlaunch"
import launcher.__main__ as command
sys.addaudithook(count)
command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("ls", "-a"), ("local", "-n", "1", "--", "true")], ids=["ls", "local"])
@pytest.mark.parametrize("first", range(1, 9))
def test_ctrl_c_during_startup_ends_distlaunch_without_output(
    tmp_path: Path, words: tuple[str, ...], first: int
) -> None:
    """SIGINT arrives during one of the hundreds of imports."""
    for count in range(first, 4000, 40):
        done = subprocess.run(
            [sys.executable, "-c", EARLY, str(count), *words],
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if not (tmp_path / "sent").exists():  # there are fewer imports
            return
        (tmp_path / "sent").unlink()
        said = [line for line in done.stderr.splitlines() if line]
        if said and said[0].startswith("Starting 1 task"):
            assert "Traceback" not in done.stderr
            return
        assert (done.returncode, said) == (130, []), count
