"""The console shows labelled lines in order and never torn, whatever tasks print and however slow the reader is."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyte
import pytest

from launcher.console.followed_log import PIECE, ZEROS
from launcher.console.terminal import NowhereSink, PlainSink
from launcher.console.writer import NOTES_LIMIT, PROGRESS_S, Console
from launcher.tasks import TaskId
from tests.harness.apart import linux
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, both, distlaunch_command
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import assert_none_left, make_mark, wait_until

COVERS = ("launcher/console",)

W0, W9, W10 = (TaskId("worker", index) for index in (0, 9, 10))
PUPPET = str(PROGRAMS / "chatty_puppet.py")
MILLION = 1_000_000


class Recorder(NowhereSink):
    """Records the text it is given, in order; calls `on_write` at each write."""

    def __init__(self, on_write: Callable[[], None] = lambda: None) -> None:
        self.given: list[str] = []
        self._on_write = on_write

    def write(self, text: bytes) -> None:
        self.given += text.decode().splitlines()
        self._on_write()

    def note(self, text: str) -> None:
        self.given.append(f"note: {text}")


class BrokenSink(NowhereSink):
    def write(self, text: bytes) -> None:
        raise BrokenPipeError

    def note(self, text: str) -> None:
        raise BrokenPipeError

    def close(self) -> None:
        raise BrokenPipeError


class Clock:
    """A clock that is set by hand and counts its reads."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def wait_for_looks(self) -> None:
        """Returns after the console has polled all its logs again."""
        before = self.looks
        wait_until(lambda: self.looks >= before + 3, "the console looks at the clock")


@contextmanager
def opened(sink: NowhereSink, tasks: Sequence[TaskId] = (W0,), **options: bool | Clock) -> Iterator[Console]:
    """A console that must close within some seconds."""
    console = Console(sink, tasks, **options)  # type: ignore[arg-type]  # mypy cannot tell the options apart
    try:
        yield console
    finally:
        closing = threading.Thread(target=console.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "close() hangs"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


class TestPlainLines:
    @linux
    def test_the_console_skips_holes_of_a_sparse_log(self, tmp_path: Path) -> None:
        """A program that truncates its log to a greater length leaves terabytes of zeros to read."""
        sink, log = Recorder(), tmp_path / "log"
        append(log, b"before\n")
        os.truncate(log, 1 << 40)
        append(log, b"after\n")
        with opened(sink) as console:
            console.follow(W0, log)
            console.note("ours")

        assert sink.given == [
            "worker:0 │ before",
            "worker:0 │ (1 TiB of zeros left out)",
            "worker:0 │ after",
            "note: ours",
        ]

    def test_the_console_omits_long_runs_of_zeros(self, tmp_path: Path) -> None:
        sink, log = Recorder(), tmp_path / "log"
        zeros = (0, ZEROS - 1, ZEROS, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 100, 0)
        append(log, b"".join(b"%d\n" % number + bytes(count) for number, count in enumerate(zeros)) + bytes(PIECE))
        with opened(sink) as console:
            console.follow(W0, log)

        shown = [line.removeprefix("worker:0 │ ") for line in sink.given]
        assert [line.replace("\0", "").replace("␀", "") for line in shown if "(" not in line] == [*"01234567"]
        assert shown[-1] == "(64 KiB of zeros left out)"
        assert "(192 KiB of zeros left out)" in shown

    def test_console_lines_are_labelled_aligned_and_on_stdout(self, tmp_path: Path) -> None:
        stdout, stderr = io.BytesIO(), io.StringIO()
        with opened(PlainSink(stdout, stderr), [W9, W10]) as console:
            for task in (W9, W10):
                append(tmp_path / str(task), f"from {task}\n\nlast".encode())
                console.follow(task, tmp_path / str(task))
            console.note("ours")

        lines = stdout.getvalue().decode().splitlines()
        assert [line for line in lines if "worker:9" in line] == [
            "worker:9  │ from worker:9",
            "worker:9  │ ",
            "worker:9  │ last",
        ]
        assert "worker:10 │ from worker:10" in lines
        assert stderr.getvalue() == "ours\n"

    def test_the_console_shows_lines_before_later_notes(self, tmp_path: Path) -> None:
        sink, log = Recorder(), tmp_path / "log"
        with opened(sink) as console:
            console.follow(W0, log)
            for number in range(20):
                append(log, b"line %d\n" % number * 1000)
                console.note(str(number))

        assert [line for line in sink.given if not line.startswith("note")] == [
            f"worker:0 │ line {number}" for number in range(20) for _ in range(1000)
        ]
        for number in range(20):
            assert f"worker:0 │ line {number}" not in sink.given[sink.given.index(f"note: {number}") :]

    def test_continuous_output_does_not_delay_a_note_of_the_console(self, tmp_path: Path) -> None:
        log = tmp_path / "log"

        def print_on() -> None:
            if not any(text.startswith("note") for text in sink.given) and len(sink.given) < 2000:
                append(log, b"and on\n")

        sink = Recorder(print_on)
        append(log, b"first\n")
        with opened(sink) as console:
            console.follow(W0, log)
            console.note("stopping")

        assert "note: stopping" in sink.given[:100]

    def test_the_console_shows_a_log_that_is_created_later(self, tmp_path: Path) -> None:
        sink = Recorder()
        with opened(sink) as console:
            console.follow(W0, tmp_path / "log")
            console.note("not there yet")
            wait_until(lambda: sink.given == ["note: not there yet"], "the note is shown")
            append(tmp_path / "log", b"now\n")
            wait_until(lambda: sink.given[1:] == ["worker:0 │ now"], "the line is shown")

    def test_an_unreadable_log_does_not_hide_other_console_lines(self, tmp_path: Path) -> None:
        sink = Recorder()
        append(tmp_path / "log", b"text\n")
        with opened(sink, [W0, W9]) as console:
            console.follow(W9, tmp_path)  # a folder
            console.follow(W0, tmp_path / "log")
            console.note("still here")

        assert sink.given == ["worker:0 │ text", "note: still here"]
        assert not console.broken

    def test_console_lines_of_concurrent_tasks_are_never_torn(self, tmp_path: Path) -> None:
        tasks = [TaskId("worker", index) for index in range(4)]
        sink = Recorder()

        def print_lines(task: TaskId) -> None:
            with (tmp_path / str(task)).open("wb", buffering=0) as file:
                for number in range(2000):
                    for piece in (b"line ", b"%d of " % number, b"%s" % str(task).encode(), b"\n"):
                        file.write(piece)

        with opened(sink, tasks) as console:
            for task in tasks:
                console.follow(task, tmp_path / str(task))
            printers = [threading.Thread(target=print_lines, args=[task]) for task in tasks]
            for printer in printers:
                printer.start()
            for printer in printers:
                printer.join()

        for task in tasks:
            own = [line for line in sink.given if line.startswith(f"{task} ")]
            assert own == [f"{task} │ line {number} of {task}" for number in range(2000)]
        assert len(sink.given) == 8000

    def test_the_console_counts_tensorflow_startup_messages_instead_of_showing_them(self, tmp_path: Path) -> None:
        chatter = (PROGRAMS / "chatty_tensorflow.txt").read_bytes()
        append(tmp_path / "log", chatter + b"user\n")
        folded, verbose = Recorder(), Recorder()
        with opened(folded) as console:
            console.follow(W0, tmp_path / "log")
        with opened(verbose, verbose=True) as console:
            console.follow(W0, tmp_path / "log")

        count = chatter.count(b"\n")
        assert folded.given == [
            "worker:0 │ user",
            f"worker:0 │ ({count} lines of TensorFlow's start-up messages only in the log)",
        ]
        assert len(verbose.given) == count + 1

    def test_console_lines_are_coloured_only_on_request(self, tmp_path: Path) -> None:
        append(tmp_path / "log", b"\x1b[1mbold\n")
        plain, coloured = Recorder(), Recorder()
        for sink in (plain, coloured):
            with opened(sink, colour=sink is coloured) as console:
                console.follow(W0, tmp_path / "log")
                console.warn("careful")
                console.error("Error: no [x]\n  because")

        assert plain.given == ["worker:0 │ bold", "note: Warning: careful", "note: Error: no [x]\n  because"]
        assert coloured.given == [
            "\x1b[38;5;30mworker:0 │ \x1b[0m\x1b[1mbold\x1b[0m",
            "note: \x1b[38;5;130mWarning: careful\x1b[0m",
            "note: \x1b[38;5;160mError: no [x]\x1b[0m\n  because",
        ]

    def test_the_console_writes_all_lines_to_a_non_blocking_pipe(self, tmp_path: Path) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        append(tmp_path / "log", b"".join(b"%d\n" % number for number in range(50_000)))
        got = bytearray()

        def read() -> None:
            while data := os.read(read_end, 1000):
                got.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(write_end, "wb", buffering=0) as stdout:
            with opened(PlainSink(stdout, io.StringIO())) as console:
                console.follow(W0, tmp_path / "log")
        reader.join()
        os.close(read_end)

        assert got.decode().splitlines() == [f"worker:0 │ {number}" for number in range(50_000)]
        assert not console.broken


class TestUnfinishedLines:
    def test_unfinished_lines_are_shown_every_10_seconds_if_changed(self, tmp_path: Path) -> None:
        sink, clock, log = Recorder(), Clock(), tmp_path / "log"
        with opened(sink, clock=clock) as console:
            console.follow(W0, log)
            append(log, b"\r10%")
            clock.wait_for_looks()
            clock.now += PROGRESS_S - 0.1
            clock.wait_for_looks()
            assert sink.given == []

            clock.now += 0.1
            wait_until(lambda: sink.given == ["worker:0 │ 10%"], "the line is shown")
            append(log, b"\r20%")
            clock.now += PROGRESS_S
            wait_until(lambda: sink.given[1:] == ["worker:0 │ 20%"], "the line is shown again")
            clock.now += 5 * PROGRESS_S
            clock.wait_for_looks()
            append(log, b"\r100%\n")
            wait_until(lambda: sink.given[2:] == ["worker:0 │ 100%"], "the line is shown when it is finished")

    def test_a_new_unfinished_line_is_not_shown_immediately(self, tmp_path: Path) -> None:
        sink, clock, log = Recorder(), Clock(), tmp_path / "log"
        with opened(sink, clock=clock) as console:
            console.follow(W0, log)
            append(log, b"wait")
            clock.wait_for_looks()
            clock.now += PROGRESS_S
            wait_until(lambda: sink.given == ["worker:0 │ wait"], "the line is shown")
            clock.now += PROGRESS_S

            append(log, b"ed\nhal")  # the rest of this line is on its way
            clock.wait_for_looks()

            assert sink.given[1:] == ["worker:0 │ waited"]
            append(log, b"f\n")
        assert sink.given[2:] == ["worker:0 │ half"]


class TestNotes:
    def test_notes_of_the_console_neutralize_escape_sequences(self) -> None:
        sink = Recorder()
        with opened(sink, colour=True) as console:
            console.note("node \x1b]0;pwned\x07: \u202etxt.exe\x9b2J")
            console.warn("banner\x1b[2J\r")
            console.error("Error: \x1b[2J\n  \x07")

        assert sink.given == [
            r"note: node ␛]0;pwned␇: \u202etxt.exe\x9b2J",
            "note: \x1b[38;5;130mWarning: banner␛[2J␍\x1b[0m",
            "note: \x1b[38;5;160mError: ␛[2J\x1b[0m\n  ␇",
        ]

    def test_unread_notes_of_the_console_are_dropped_and_counted(self) -> None:
        stuck, reading = threading.Event(), threading.Event()

        class Stuck(Recorder):
            def note(self, text: str) -> None:
                stuck.set()
                assert reading.wait(30)
                super().note(text)

        sink = Stuck()
        with opened(sink) as console:
            console.note("0")
            assert stuck.wait(30)
            for number in range(1, 3 * NOTES_LIMIT):
                console.note(f"{number}")
            reading.set()

        kept = [line for line in sink.given if "lines left out" not in line]
        [left_out] = [line for line in sink.given if "lines left out" in line]
        assert kept == [f"note: {number}" for number in range(len(kept))]
        assert len(kept) == 1 + NOTES_LIMIT
        assert left_out == f"note: ({2 * NOTES_LIMIT - 1:,} lines left out: the terminal did not read them in time)"


class TestBrokenOutput:
    def test_the_console_detects_broken_output(self, tmp_path: Path) -> None:
        append(tmp_path / "log", b"text\n")
        with opened(BrokenSink()) as console:
            console.follow(W0, tmp_path / "log")
            wait_until(lambda: console.broken, "the console knows")
            console.note("to nobody")

    def test_closing_the_console_does_not_hang_on_broken_output(self, tmp_path: Path) -> None:
        append(tmp_path / "log", b"text")
        console = Console(BrokenSink())
        console.follow(W0, tmp_path / "log")
        closing = threading.Thread(target=console.close, daemon=True)
        closing.start()
        closing.join(30)

        assert not closing.is_alive()
        assert console.broken

    def test_the_console_detects_a_closed_pipe(self, tmp_path: Path) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        append(tmp_path / "log", b"text\n")
        with os.fdopen(write_end, "wb", buffering=0) as stdout:
            with opened(PlainSink(stdout, io.StringIO())) as console:
                console.follow(W0, tmp_path / "log")
                wait_until(lambda: console.broken, "the console knows")


# --- through the command ------------------------------------------------------------------------------------


class TestCommand:
    @pytest.mark.slow
    def test_a_run_shows_a_million_lines_completely_and_in_order(self, distlaunch: Distlaunch) -> None:
        ran = distlaunch("local", "--workers", "1", str(PROGRAMS / "chatty_lines.py"), str(MILLION))

        assert ran.status == 0
        log = ran.log()
        expected = [f"line {number}" for number in range(MILLION)]
        expected.insert(501_000, "half of it")
        assert_same_bytes(log, "".join(f"{line}\n" for line in expected).encode())
        assert_same_bytes(ran.stdout.encode(), "".join(f"worker:0 │ {line}\n" for line in expected).encode())

    def test_a_run_truncates_a_line_of_10_mb_but_logs_it_completely(self, distlaunch: Distlaunch) -> None:
        ran = distlaunch(
            "local", "-n", "1", "--", "sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x; echo; echo next"
        )

        assert ran.status == 0
        assert_same_bytes(ran.log(), b"x" * 10_000_000 + b"\nnext\n")
        assert ran.stdout.splitlines() == [
            f"worker:0 │ {'x' * 8192}... (cut here; the log has the whole line)",
            "worker:0 │ next",
        ]

    def test_a_log_keeps_bytes_that_are_not_utf_8(self, distlaunch: Distlaunch) -> None:
        ran = distlaunch("local", "-n", "1", "--", "printf", r"caf\351 \377\n")

        assert ran.log() == b"caf\xe9 \xff\n"
        assert ran.stdout == "worker:0 │ caf\ufffd \ufffd\n"

    def test_stdout_of_a_run_has_only_the_output_of_tasks(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        ran = distlaunch("local", "-n", "2", "--", *both(tmp_path, "echo out; echo err >&2", "exit 3"))

        assert ran.status == 1
        assert sorted(set(ran.stdout.splitlines())) == [
            *("worker:0 │ err", "worker:0 │ out", "worker:1 │ err", "worker:1 │ out")
        ]
        assert "Error: worker:" in ran.stderr
        assert f"Logs: {ran.directory} · page: distlaunch report\n" in ran.stderr

    def test_closing_stdout_ends_the_run_and_leaves_no_process(self, tmp_path: Path) -> None:
        mark = make_mark()
        command = distlaunch_command("local", "-n", "2", "--run-dir", str(tmp_path / "run"), "--")
        task = ["sh", "-c", "seq 100000; sleep 600"]
        with subprocess.Popen(
            [*command, *task],
            env={**os.environ, **mark, "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as launched:
            assert launched.stdout is not None
            assert launched.stderr is not None
            first = [launched.stdout.readline() for _ in range(3)]
            launched.stdout.close()
            said = launched.stderr.read().decode()
            status = launched.wait(30)

        assert [line.partition(b" ")[0] for line in first] == [b"worker:%s" % line[7:8] for line in first]
        assert status == 128 + signal.SIGPIPE
        assert "Traceback" not in said
        assert "Exception ignored" not in said
        assert_none_left(mark)

    def test_a_stalled_reader_neither_blocks_a_run_nor_fills_its_memory(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        command = distlaunch_command("local", "-n", "1", "--run-dir", str(run))
        with subprocess.Popen(
            [*command, str(PROGRAMS / "chatty_lines.py"), str(MILLION)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as launched:
            assert launched.stdout is not None
            process = psutil.Process(launched.pid)
            first = launched.stdout.readline()
            before = process.memory_info().rss
            log = run / "attempt-1" / "worker-0.log"
            wait_until(lambda: (run / "report.json").exists(), "the task ends and its report is written")

            assert log.stat().st_size > 11 * MILLION
            assert launched.poll() is None
            waiting = process.memory_info().rss
            rest = launched.stdout.read()
            assert launched.wait(30) == 0

        assert (first + rest).count(b"\n") == MILLION + 1
        assert rest.endswith(b"worker:0 \xe2\x94\x82 line 999999\n")
        assert waiting - before < 30 << 20
        assert waiting < 150 << 20

    def test_ctrl_c_ends_a_finished_run_with_a_stalled_reader(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        command = distlaunch_command("local", "-n", "1", "--run-dir", str(run), "--", "seq", "200000")
        env = {**os.environ, "PYTHONUNBUFFERED": ""}  # Python's own buffers are where an end can hang
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launched:
            assert launched.stderr is not None
            wait_until(lambda: (run / "report.json").exists(), "the report is written")
            signalled = time.monotonic()
            launched.send_signal(signal.SIGINT)
            # The first signal may arrive before its handler is in place; a user would press Ctrl-C again.
            while launched.poll() is None:
                if time.monotonic() - signalled > 3:
                    signalled = time.monotonic()
                    launched.send_signal(signal.SIGINT)
                time.sleep(0.01)
            assert launched.returncode == 0  # the run itself had already succeeded, as the report says
            assert b"Fatal" not in launched.stderr.read()


# --- on a terminal ------------------------------------------------------------------------------------------


class OnTerminal:
    """`distlaunch local` with puppets as its tasks, on a terminal of 24 lines and 60 columns."""

    LINES, COLUMNS = 24, 60

    def __init__(self, directory: Path, **env: str) -> None:
        self.raw = b""
        self.screen = pyte.Screen(self.COLUMNS, self.LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._orders = directory / "orders"
        self._orders.mkdir()
        self._told: dict[int, int] = {}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.LINES, self.COLUMNS, 0, 0))
        unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        self._process = subprocess.Popen(
            [
                *distlaunch_command("local", "-n", "2", "--no-live", "--run-dir", str(directory / "run"), "--"),
                *(sys.executable, "-S", PUPPET, str(self._orders)),
            ],
            env={**{name: value for name, value in os.environ.items() if name not in unset}, "TERM": "xterm", **env},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)

    def tell(self, worker: int, text: str) -> None:
        """Makes a task print this text unchanged."""
        number = self._told[worker] = self._told.get(worker, 0) + 1
        whole = self._orders / f".{worker}"
        whole.write_text(text, newline="")
        whole.rename(self._orders / f"worker-{worker}.{number}")

    def lines(self) -> list[str]:
        """The lines of tasks on the screen, from top to bottom."""
        return [line.rstrip() for line in self.screen.display if line.startswith("worker:")]

    def wait_for(self, *lines: str) -> None:
        """Returns when the screen shows these lines of tasks and no others."""
        wait_until(lambda: self.read() and self.lines() == [*lines], f"{lines} on the screen")

    def end(self) -> int:
        """Ends the tasks; returns distlaunch's exit status."""
        (self._orders / "end").touch()
        wait_until(lambda: self.read() and self._process.poll() is not None, "distlaunch ends")
        self.read()
        return self._process.returncode

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        while self._process.poll() is None:
            self.read()
        os.close(self._master)

    def read(self) -> bool:
        """Feeds the output so far to the screen; returns true for use in conditions."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # Linux raises this once nobody has the terminal open
                break
            if not data:
                break
            self.raw += data
            self._stream.feed(data)
        return True


OpenTerminal = Callable[..., OnTerminal]


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[OpenTerminal]:
    opened_ones: list[OnTerminal] = []

    def open_one(**env: str) -> OnTerminal:
        opened_ones.append(OnTerminal(tmp_path, **env))
        return opened_ones[-1]

    yield open_one
    for terminal in opened_ones:
        terminal.close()


class TestTerminal:
    def test_progress_bars_are_updated_in_place_below_finished_lines(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal()
        terminal.tell(0, "\r10% ###")
        terminal.wait_for("worker:0 │ 10% ###")
        terminal.tell(1, "\r15% ###")
        terminal.wait_for("worker:0 │ 10% ###", "worker:1 │ 15% ###")

        terminal.tell(0, "\r20% ######")
        terminal.wait_for("worker:0 │ 20% ######", "worker:1 │ 15% ###")
        terminal.tell(1, "\r100% ##########\nEpoch 2\n")
        terminal.wait_for("worker:1 │ 100% ##########", "worker:1 │ Epoch 2", "worker:0 │ 20% ######")
        terminal.tell(0, "\r100% ##########\n")
        finished = ["worker:1 │ 100% ##########", "worker:1 │ Epoch 2", "worker:0 │ 100% ##########"]
        terminal.wait_for(*finished)

        assert terminal.end() == 0
        assert terminal.lines() == finished
        assert not terminal.screen.cursor.hidden
        assert terminal.screen.display[0].startswith("Starting 2 tasks")
        assert any(line.startswith("Succeeded in ") for line in terminal.screen.display)

    def test_progress_bars_stay_at_the_bottom_when_lines_scroll(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal()
        terminal.tell(0, "\r10%")
        terminal.wait_for("worker:0 │ 10%")

        terminal.tell(1, "".join(f"line {number}\n" for number in range(50)))

        shown = [f"worker:1 │ line {number}" for number in range(50)]
        wait_until(
            lambda: terminal.read() and terminal.lines()[-2:] == [shown[-1], "worker:0 │ 10%"], "the bar is below"
        )
        assert terminal.lines()[:-1] == shown[-len(terminal.lines()) + 1 :]
        assert len(terminal.lines()) >= terminal.LINES - 1

    def test_long_progress_bars_are_truncated_to_one_line(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal()
        for step in range(3):
            terminal.tell(0, f"\r{step} {'━' * 100}")
            terminal.wait_for(f"worker:0 │ {step} {'━' * 46}…")

        # If the bar took a second row, that row would remain on the screen.
        terminal.tell(0, "\rdone\n")
        terminal.wait_for("worker:0 │ done")
        assert "━" not in "".join(terminal.screen.display)

    def test_an_unfinished_progress_bar_of_an_ended_task_is_shown_once(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal()
        terminal.tell(0, "\r10%\r20%")
        terminal.wait_for("worker:0 │ 20%")

        assert terminal.end() == 0
        assert terminal.lines() == ["worker:0 │ 20%"]

    def test_labels_are_coloured_and_colours_of_a_task_end_with_its_line(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal()
        terminal.tell(0, "\x1b[31mred\nplain\n")
        terminal.wait_for("worker:0 │ red", "worker:0 │ plain")

        assert b"\x1b[38;5;30mworker:0 \xe2\x94\x82 \x1b[0m" in terminal.raw
        rows = [row for row, line in enumerate(terminal.screen.display) if line.startswith("worker:0")]
        assert [terminal.screen.buffer[row][11].fg for row in rows] == ["red", "default"]
        assert {terminal.screen.buffer[row][0].fg for row in rows} == {"008787"}

    def test_terminal_output_has_no_colour_with_no_color(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal(NO_COLOR="1")
        terminal.tell(0, "\x1b[31mred\n\r\x1b[1m10%")
        terminal.wait_for("worker:0 │ red", "worker:0 │ 10%")
        terminal.end()

        assert re.findall(rb"\x1b\[[0-9;]+m", terminal.raw) == []

    def test_a_dumb_terminal_gets_plain_output(self, open_terminal: OpenTerminal) -> None:
        terminal = open_terminal(TERM="dumb")
        terminal.tell(0, "\x1b[31mred\n\r10%")
        terminal.wait_for("worker:0 │ red")
        terminal.end()

        assert b"\x1b" not in terminal.raw
        assert terminal.lines() == ["worker:0 │ red", "worker:0 │ 10%"]
