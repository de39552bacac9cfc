"""The live view in a run's own terminal and in `attach`: complete logs, a correct picture, keys, and ways out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import termios
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.commands.requests import ask_status, ask_to_end
from launcher.errors import UsageError
from launcher.rundir.directory import RunDir
from tests.harness.places import PROGRAMS, ROOT
from tests.harness.processes.commands import distlaunch_command
from tests.harness.terminals import Terminal
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = ("launcher/console", "launcher/controller/live.py", "launcher/rundir/summary.py")

WIDE = 250
"""Enough columns for the path of a run's folder."""
STEPS = str(PROGRAMS / "live_steps.py")
HEADER = re.compile(r"^── \S+: ")


class LiveRun:
    """`distlaunch local` with two tasks that report their steps, or `argv`, on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.files = RunDir(folder / "run")
        self.end_file = folder / "end"
        self._terminals: list[Terminal] = []
        self.mark = make_mark()

    def command(self, *options: str, step_s: float = 0.05, verb: str = "local") -> list[str]:
        run_dir = ("--run-dir", str(self.files.root))
        program = (STEPS, str(self.end_file), str(step_s))
        return distlaunch_command(verb, "-n", "2", "--oversubscribe", *run_dir, *options, *program)

    def open(self, argv: list[str] | None = None, **options: Any) -> Terminal:
        terminal = Terminal(argv or self.command(), **{**self.mark, **options})
        self._terminals.append(terminal)
        return terminal

    def log(self, worker: int) -> list[str]:
        return (self.files.root / "attempt-1" / f"worker-{worker}.log").read_text().splitlines()

    @property
    def controller(self) -> psutil.Process:
        return psutil.Process(json.loads(self.files.run.read_text())["controller"]["pid"])

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.files.run.read_text())
        return facts

    def close(self) -> None:
        for terminal in self._terminals:
            terminal.close()
        if self.files.run.exists():
            with contextlib.suppress(UsageError):
                ask_to_end(self.files, now=True)
        await_none_left(self.mark)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    opened = LiveRun(tmp_path)
    yield opened
    opened.close()


def headers(terminal: Terminal) -> list[str]:
    return [line for line in terminal.display if HEADER.match(line)]


def is_training(terminal: Terminal) -> bool:
    """Whether the picture has both tasks, with their steps."""
    shown = [line for line in terminal.display if re.match(r"[12] worker:[01] training .*\d", line)]
    return len(shown) == 2 and len(headers(terminal)) == 1


def at_prompt(shell: Terminal) -> bool:
    return shell.display[shell.screen.cursor.y] == "PROMPT>"


def fits(terminal: Terminal, columns: int) -> bool:
    """Whether the picture is as wide as the terminal."""
    return is_training(terminal) and max(map(len, headers(terminal))) >= columns - 1


def check_complete(run: LiveRun, terminal: Terminal) -> None:
    """Checks for all lines of all logs, once each and in order, without the live view, and the verdict below them."""
    shown = [line for line in terminal.scrolled if line]
    for worker in (0, 1):
        prefix = f"worker:{worker} │ "
        assert [line.removeprefix(prefix) for line in shown if line.startswith(prefix)] == run.log(worker)
    others = [line for line in shown if not line.startswith("worker:")]
    assert others[0].startswith("Starting 2 tasks on this machine")
    assert others[1].startswith("The cluster is up after")
    assert others[-2].startswith("Succeeded in ")
    assert others[-1].startswith("Logs: ")
    assert len(others) == 7, others
    assert not terminal.screen.cursor.hidden
    assert termios.tcgetattr(terminal.slave) == terminal.modes


@pytest.mark.slow
def test_the_live_view_leaves_only_a_complete_scrollback_at_the_end(run: LiveRun) -> None:
    terminal = run.open(run.command(step_s=0.005), columns=WIDE)
    terminal.until(lambda: is_training(terminal))
    terminal.until(lambda: len(run.log(0)) > 500)
    run.end_file.touch()
    assert terminal.end() == 0
    check_complete(run, terminal)


@pytest.mark.slow
def test_the_live_view_follows_the_size_of_the_terminal(run: LiveRun) -> None:
    terminal = run.open(columns=80, rows=24)
    terminal.until(lambda: is_training(terminal))
    for columns, rows in ((40, 10), (200, 60), (90, 30)):
        terminal.resize(columns, rows)
        terminal.until(partial(fits, terminal, columns))
        place = next(row for row, line in enumerate(terminal.display) if HEADER.match(line))
        end = max(row for row, line in enumerate(terminal.display, 1) if line)
        assert end - place <= rows // 2
        assert all(re.match(r"worker:[01] │ |\s|The |Starting|-", line) for line in terminal.display[1:place] if line)
    terminal.shows("/10,000 ", "────", " left ──")
    run.end_file.touch()
    assert terminal.end() == 0
    assert headers(terminal) == []
    terminal.shows("Succeeded in ")


@pytest.mark.slow
def test_the_live_view_is_redrawn_at_most_four_times_a_second(run: LiveRun) -> None:
    terminal = run.open(run.command(step_s=0.01))
    terminal.until(lambda: is_training(terminal))
    before, began = terminal.raw.count(b"\x1b[?2026h"), time.monotonic()
    terminal.until(lambda: time.monotonic() - began > 4)
    frames = terminal.raw.count(b"\x1b[?2026h") - before
    assert 4 < frames <= 4 * (time.monotonic() - began) + 1


@pytest.mark.slow
class TestKeysOfTheLiveView:
    def test_live_view_keys_show_help_one_log_or_all_logs(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.type(b"?")
        terminal.shows("the Python stacks of all tasks", "detach; the run continues")
        terminal.type(b"x2")
        terminal.shows(" · only worker:1 ")
        count = len([line for line in terminal.scrolled if line.startswith("worker:0 │ ")])
        ones = len(run.log(1))
        terminal.until(lambda: len(run.log(1)) > ones + 20)
        assert len([line for line in terminal.scrolled if line.startswith("worker:0 │ ")]) == count
        terminal.type(b"a")
        terminal.until(lambda: len([line for line in terminal.scrolled if line.startswith("worker:0 │ ")]) > count)

    def test_the_s_key_of_the_live_view_shows_stacks(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.type(b"s")
        terminal.until(lambda: "/live_steps.py:" in "".join(terminal.scrolled))  # a long path goes over two lines

    def test_the_q_key_of_the_live_view_stops_after_confirmation(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.type(b"q")
        terminal.shows("Stop the run? y/n")
        terminal.type(b"n")
        terminal.until(lambda: "Stop the run?" not in terminal.text)
        assert ask_status(run.files).state == "running"
        terminal.type(b"qy")
        assert terminal.end() == 130
        terminal.shows("Interrupting all tasks", "0 processes left", "Interrupted after")
        assert termios.tcgetattr(terminal.slave) == terminal.modes

    @pytest.mark.smoke
    def test_ctrl_c_in_the_live_view_stops_the_run(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.type(b"\x03")
        assert terminal.end() == 130
        assert terminal.text.count("Interrupting all tasks") == 1  # the waiting process does not pass it on as well
        terminal.shows("0 processes left", "Interrupted after")

    def test_a_second_ctrl_c_in_the_live_view_kills_the_tasks(self, run: LiveRun) -> None:
        stubborn = ("sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 0.1; done")
        terminal = run.open(
            distlaunch_command("local", "-n", "1", "--run-dir", str(run.files.root), "--", *stubborn), columns=WIDE
        )
        terminal.shows("worker:0 │ up")
        terminal.type(b"\x03")
        terminal.shows("10 s grace; Ctrl-C again kills them")
        assert "Killing all" not in terminal.text
        terminal.type(b"\x03")
        assert terminal.end() == 130
        terminal.shows("Killing all tasks", "SIGKILL (signal 9)")

    def test_the_d_key_of_the_live_view_detaches_the_run(self, run: LiveRun) -> None:
        terminal = run.open(columns=WIDE)
        terminal.until(lambda: is_training(terminal))
        controller = run.controller
        terminal.type(b"d")
        assert terminal.end() == 0
        terminal.shows(f"distlaunch attach {run.files.root}", "stop it")
        assert headers(terminal) == []
        assert termios.tcgetattr(terminal.slave) == terminal.modes
        assert os.getsid(controller.pid) == controller.pid
        controller.send_signal(signal.SIGHUP)
        before = len(run.log(0))
        wait_until(lambda: len(run.log(0)) > before + 20, "it trains on")
        assert ask_status(run.files).state == "running"
        run.end_file.touch()
        wait_until(lambda: run.facts()["ended"], "it ends")
        assert run.facts()["outcome"] == "succeeded"


@pytest.mark.slow
class TestProcesses:
    """The process that the shell waits for, and the controller."""

    def test_the_waiting_process_forwards_signals_to_the_controller(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        assert run.controller.pid != terminal.process.pid
        terminal.process.send_signal(signal.SIGUSR1)
        terminal.until(lambda: "/live_steps.py:" in "".join(terminal.scrolled))  # a long path goes over two lines
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert run.facts()["outcome"] == "interrupted"

    def test_killing_the_waiting_process_ends_the_run_like_a_hangup(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.process.kill()
        wait_until(lambda: run.facts()["ended"], "the run ends")
        assert run.facts()["exit_status"] == 129

    def test_the_waiting_process_restores_the_terminal_if_the_controller_is_killed(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        assert terminal.screen.cursor.hidden
        run.controller.kill()
        assert terminal.end() == -signal.SIGKILL
        assert termios.tcgetattr(terminal.slave) == terminal.modes
        assert not terminal.screen.cursor.hidden
        assert headers(terminal) == []

    def test_the_waiting_process_uses_less_than_16_mib(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        assert psutil.Process(terminal.process.pid).memory_full_info().uss < 16 << 20

    def test_closing_the_terminal_ends_the_run(self, run: LiveRun) -> None:
        terminal = run.open()
        terminal.until(lambda: is_training(terminal))
        terminal.hang_up()
        wait_until(lambda: run.facts()["ended"], "the run ends")
        assert run.facts()["exit_status"] == 129

    def test_an_error_before_the_start_is_shown_on_a_terminal(self, run: LiveRun) -> None:
        terminal = run.open(distlaunch_command("local", "-n", "1", "nowhere.py"))
        assert terminal.end() == 2
        terminal.shows("cannot read the script")


@pytest.mark.slow
def test_ctrl_s_pauses_the_output_but_not_training_and_loses_no_line(run: LiveRun) -> None:
    terminal = run.open(run.command(step_s=0.01), columns=WIDE)
    terminal.until(lambda: is_training(terminal))
    terminal.type(b"\x13")  # Ctrl-S
    steps = len(run.log(0))
    wait_until(lambda: len(run.log(0)) > steps + 300, "tasks train on for 3 s")
    assert ask_status(run.files).state == "running"
    terminal.type(b"\x11")  # Ctrl-Q
    terminal.until(lambda: any(f"worker:0 does step {steps + 250}" in line for line in terminal.scrolled))
    terminal.until(lambda: is_training(terminal))
    run.end_file.touch()
    assert terminal.end() == 0
    check_complete(run, terminal)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_paused_output(run: LiveRun) -> None:
    terminal = run.open()
    terminal.until(lambda: is_training(terminal))
    terminal.type(b"\x13")
    steps = len(run.log(0))
    wait_until(lambda: len(run.log(0)) > steps + 20, "tasks train on")
    terminal.type(b"\x03")
    assert terminal.end() == 130


@pytest.mark.slow
class TestShells:
    @pytest.fixture(params=["bash", "zsh"])
    def shell(self, request: pytest.FixtureRequest, run: LiveRun) -> Terminal:
        argv = {"bash": ["/bin/bash", "--norc", "-i"], "zsh": ["/usr/bin/zsh", "-f", "-i"]}[request.param]
        if not Path(argv[0]).exists():
            pytest.skip(f"{request.param} is not installed")
        terminal = run.open(argv, columns=100, PS1="PROMPT> ", PROMPT="PROMPT> ")
        terminal.shows("PROMPT>")
        return terminal

    def test_ctrl_z_hides_and_fg_restores_the_live_view_of_a_run(self, run: LiveRun, shell: Terminal) -> None:
        shell.type(shlex.join(run.command()).encode() + b"\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"\x1a")
        shell.until(lambda: at_prompt(shell))
        assert headers(shell) == []
        assert not shell.screen.cursor.hidden
        assert run.controller.status() == psutil.STATUS_STOPPED
        steps = len(run.log(0))
        wait_until(lambda: len(run.log(0)) > steps + 20, "the tasks train on")
        shell.type(b"echo $((6*7))\n")
        shell.until(lambda: "42" in shell.display)  # the shell reads lines, and echoes
        shell.type(b"fg\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"qy")
        shell.until(lambda: at_prompt(shell))
        shell.type(b"echo status $?\n")
        shell.until(lambda: "status 130" in shell.display)

    def test_a_background_job_shows_only_lines_and_the_live_view_after_fg(self, run: LiveRun, shell: Terminal) -> None:
        shell.type(shlex.join(run.command()).encode() + b" &\n")
        shell.shows("worker:0 does step 30")
        assert b"\x1b[?2026h" not in shell.raw
        assert run.controller.status() != psutil.STATUS_STOPPED
        shell.type(b"fg\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"\x1a")
        shell.until(lambda: at_prompt(shell))
        assert headers(shell) == []
        shell.type(b"bg\n")
        steps = len(run.log(0))
        shell.until(lambda: any(f"worker:0 does step {steps + 20}" in line for line in shell.scrolled))
        assert headers(shell) == []
        shell.type(b"fg\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"d")
        shell.shows("distlaunch attach")
        assert ask_status(run.files).state == "running"


@pytest.mark.slow
class TestWithoutLiveView:
    @pytest.mark.parametrize(
        ("options", "env"),
        [(["--no-live"], {}), ([], {"CI": "true"}), ([], {"TERM": "dumb"})],
        ids=["no-live", "ci", "dumb"],
    )
    def test_a_run_without_a_live_view_prints_lines_from_one_process(
        self, run: LiveRun, options: list[str], env: dict[str, str]
    ) -> None:
        terminal = run.open(run.command(*options), columns=WIDE, **env)
        terminal.shows("worker:0 does step 20")
        assert run.controller.pid == terminal.process.pid
        run.end_file.touch()
        assert terminal.end() == 0
        assert b"\x1b[?2026h" not in terminal.raw
        check_complete(run, terminal)


@pytest.mark.slow
class TestAttach:
    def test_attach_shows_the_live_view_until_q_d_or_ctrl_c(self, run: LiveRun) -> None:
        own = run.open()
        own.until(lambda: is_training(own))
        for key in (b"q", b"d", b"\x03"):
            terminal = run.open(distlaunch_command("attach", str(run.files.root)))
            terminal.until(partial(is_training, terminal))
            terminal.type(b"1")
            terminal.shows(" · only worker:0 ")
            terminal.type(key)
            assert terminal.end() == 0
            terminal.shows("Detached; the run continues")
            assert headers(terminal) == []
            assert termios.tcgetattr(terminal.slave) == terminal.modes
        own.read()
        assert is_training(own)

    def test_ctrl_z_hides_and_fg_restores_the_live_view_of_attach(self, run: LiveRun) -> None:
        own = run.open()
        own.until(lambda: is_training(own))
        shell = run.open(["/bin/bash", "--norc", "-i"], columns=100, PS1="PROMPT> ")
        shell.shows("PROMPT>")
        shell.type(shlex.join(distlaunch_command("attach", str(run.files.root))).encode() + b"\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"\x1a")
        shell.until(lambda: at_prompt(shell))
        assert headers(shell) == []
        shell.type(b"fg\n")
        shell.until(lambda: is_training(shell))
        shell.type(b"q")
        shell.until(lambda: at_prompt(shell))
        shell.shows("Detached; the run continues")

    def test_attach_notes_a_controller_that_does_not_answer(self, run: LiveRun) -> None:
        own = run.open()
        own.until(lambda: is_training(own))
        terminal = run.open(distlaunch_command("attach", str(run.files.root)), columns=150)
        terminal.until(lambda: is_training(terminal))
        controller = run.controller
        controller.suspend()
        terminal.shows("the controller does not answer; its last answer is")
        controller.resume()
        terminal.until(lambda: "does not answer" not in terminal.text)
        controller.kill()
        assert terminal.end() == 3
        terminal.shows("is gone [lost]")


def test_a_keyboard_released_while_it_is_acquired_stays_released(run: LiveRun) -> None:
    """As when Ctrl-Z follows right after `fg`; acquiring it repeatedly acquires it once."""
    code = (
        "import termios, tty; from launcher.console.keyboard import Keyboard\n"
        "keyboard, before, set_mode = Keyboard(), termios.tcgetattr(0), tty.setcbreak\n"
        "tty.setcbreak = lambda *arguments: (set_mode(*arguments), keyboard.give_back())\n"
        "keyboard.take(); print('first', keyboard.readable, termios.tcgetattr(0) == before)\n"
        "tty.setcbreak = set_mode\n"
        "keyboard.take(); print('second', keyboard.readable)\n"
        "keyboard.allow(); keyboard.take(); keyboard.take(); print('third', keyboard.readable)\n"
        "keyboard.give_back(); print('fourth', keyboard.readable, termios.tcgetattr(0) == before)\n"
    )
    terminal = run.open([sys.executable, "-c", code], cwd=ROOT)
    assert terminal.end() == 0
    assert [line for line in terminal.display if line] == ["first [] True", "second []", "third [0]", "fourth [] True"]
