"""The live view: which tasks it shows, that it fits the terminal, and that one frame is one write."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.text import Text

from launcher.console.keys import KeyActions, Keys
from launcher.console.live_tasks import StepHistory, choose_tasks, render_bar, render_spark
from launcher.console.live_view import Asked, LiveRegion, Seen, Unfinished
from launcher.console.terminal import FRAME_S, Size, TerminalSink
from launcher.console.writer import LiveArea
from launcher.report.status_report import GpuState, NodeState, RunStatus, TaskState
from launcher.tasks import TaskId
from tests.harness.builders.statuses import make_status
from tests.harness.pictures import draw, keep, read_description
from tests.harness.terminals import Screen, screen_of

NOW = 1_700_000_000.0


def task(name: str, state: str = "training", **fields: Any) -> TaskState:
    return TaskState.model_validate(
        {"task": name, "node": "local", "state": state, "metrics": {}, "gpus": [], **fields}
    )


def status(*tasks: TaskState, age_s: float = 200.0, **fields: object) -> RunStatus:
    known = {"name": "two", "attempt": 2, "restarts": 1, "started": NOW - age_s, "now": NOW, "eta_s": 75.0}
    return make_status(*tasks, **{**known, **fields})


def training(number: int, **fields: Any) -> TaskState:
    known: dict[str, Any] = {"epoch": 3, "step": 250, "step_s": 0.1, "own_s": 0.02, "cpu": 0.98, "memory": 3 << 29}
    total: dict[str, Any] = {"total_steps": 1000, "total_epochs": 12, "metrics": {"loss": 0.12345}}
    return task(f"worker:{number}", **{**known, **total, **fields})


class Picture:
    """A region whose status and time are set by hand."""

    def __init__(self, seen: RunStatus | None, problem: str = "", *, colour: bool = False) -> None:
        self.now = 0.0
        self.seen = Seen(seen, problem)
        self.region = LiveRegion(colour=colour, clock=lambda: self.now)
        self.region.look = lambda: self.seen

    def lines(self, columns: int = 80, rows: int = 24, *unfinished: Unfinished) -> list[str]:
        return self.region.lines(Size(columns, rows), unfinished)


class TestView:
    def test_the_live_view_shows_the_run_and_one_line_per_task(self) -> None:
        header, titles, first, second = Picture(status(training(0), training(1, step=500))).lines(120)
        assert header.startswith("── two: running · attempt 2 · 3 min 20 s · 1 min 15 s left ───")
        assert titles.split() == ["TASK", "STATE", "EPOCH", "STEP", "PROGRESS", "STEPS/S", "LOSS", "CPU", "MEM", "OWN"]
        assert first.split()[:5] == ["1", "worker:0", "training", "3/12", "250/1,000"]
        assert first.split()[6:] == ["10", "0.1235", "98%", "1.5", "GiB", "20", "ms"]
        assert "━━━━━━────" in first
        assert "━━━━━━━━━━━━────" in second

    def test_the_picture_in_the_documents_is_what_the_live_view_shows(self) -> None:
        tasks = [
            training(
                number,
                node=f"gpu-{node}",
                step=1_250,
                total_steps=4_800,
                own_s=own_s,
                slow=slow,
                cpu=cpu,
                memory=(9 + number) << 28,
            )
            for number, (node, own_s, slow, cpu) in enumerate(
                [
                    ("a", 0.031, "", 3.6),
                    ("a", 0.032, "", 3.5),
                    ("b", 0.03, "", 3.7),
                    ("b", 0.094, "input pipeline", 1.2),
                ]
            )
        ]
        seen = status(*tasks, name="two-nodes", attempt=1, restarts=0, eta_s=355.0)
        picture = Picture(seen, colour=True)
        picture.region.asked = Asked(hint="? keys")
        lines = [Text.from_ansi(line) for line in picture.lines(118)]
        shown = "\n".join(line.plain for line in lines)

        keep("live.svg", draw(lines, 118, shown), shown)

        assert "input pipeline" in shown
        assert read_description("live.svg") == shown

    @pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (200, 60), (20, 4), (1, 1)])
    @pytest.mark.parametrize("count", [1, 2, 8, 30, 1000])
    def test_the_live_view_fits_into_half_of_the_terminal(self, columns: int, rows: int, count: int) -> None:
        bar = Unfinished(TaskId("ps", 0), b"ps:0 | ", b"10% " + b"#" * 500)
        seen = status(*(training(number, step=number * 7 or None) for number in range(count)))
        lines = Picture(seen).lines(columns, rows, bar)
        assert 1 <= len(lines) <= max(rows // 2, 1)
        assert max(map(cell_len, lines)) <= columns

    def test_the_live_view_lists_failed_and_slow_tasks_first_if_space_is_short(self) -> None:
        tasks = [training(number, own_s=number / 1000) for number in range(30)]
        tasks[17] = task("worker:17", "exit status 1")
        tasks[5] = task("worker:5", "stopped by a signal", step=3)
        tasks[9] = task("worker:9", "has not imported TensorFlow")
        tasks[11] = training(11, own_s=0.011).model_copy(update={"slow": "input pipeline"})
        lines = Picture(status(*tasks)).lines(80, 24)
        assert len(lines) == 12
        names = [line.split()[1] for line in lines[2:-1]]
        slowest = [f"worker:{number}" for number in range(26, 30)]
        assert names == ["worker:17", "worker:5", "worker:11", "worker:9", "worker:0", *slowest]
        assert "slow: in" in lines[4]
        assert lines[-1] == "  +21 more: 21 training"
        assert [line.split()[0] for line in lines[2:6]] == ["18", "6", "12", "10"]  # the numbers that keys take

    def test_the_live_view_always_shows_the_chief(self) -> None:
        tasks = [task("worker:0", "exit status 1"), training(1), task("chief:0", "training", step=1)]
        assert [state.task for _, state in choose_tasks(tasks, 1)] == ["chief:0"]

    def test_the_live_view_hides_empty_columns(self) -> None:
        _, titles, line = Picture(status(task("worker:0", "waiting for its node"))).lines()
        assert (titles.split(), line.split()) == (["TASK", "STATE"], ["1", "worker:0", "waiting", "for", "its", "node"])

    def test_the_live_view_drops_columns_on_a_narrow_terminal(self) -> None:
        lines = Picture(status(training(0))).lines(40, 10)
        assert lines[1] == "1 worker:0 training 250/1,000 10 0.1235"

    @pytest.mark.parametrize("columns", [60, 79, 80, 100, 120, 200])
    def test_the_live_view_uses_the_full_width_without_cutting_columns(self, columns: int) -> None:
        """No column is cut, and the last character of a full row stays."""
        wide = Picture(status(training(0), training(1))).lines(400, 24)
        cells = {cell for line in wide[1:] for cell in line.split()}
        lines = Picture(status(training(0), training(1))).lines(columns, 24)
        shown = [line.rstrip() for line in screen_of(columns, 24, lines).display]
        assert shown[1:5] == [line.rstrip() for line in lines]
        assert len(shown[1]) == columns
        assert {cell for line in lines[1:] for cell in line.split() if not set(cell) <= set("━╸─▁▂▃▄▅▆▇█")} <= cells

    def test_the_live_view_averages_the_use_of_the_gpus_of_a_task(self) -> None:
        gpus = [GpuState(gpu=str(n), use=use, memory=1, memory_total=2) for n, use in enumerate((0.5, 0.9, 0.1))]
        node = NodeState(node="local", cores=8, memory=1, memory_total=2, gpus=gpus)
        lines = Picture(status(training(0, gpus=["0", "1"]), nodes=[node])).lines(160)
        assert " 70% " in lines[2]

    def test_the_live_view_reports_a_controller_that_does_not_answer(self) -> None:
        assert (
            Picture(None, "the controller does not answer")
            .lines()[0]
            .startswith("── the controller does not answer ──")
        )
        [header, *_] = Picture(status(training(0)), "the controller does not answer").lines(120)
        assert "1 min 15 s left · the controller does not answer ──" in header

    def test_the_live_view_shows_unfinished_lines_of_tasks_without_steps(self) -> None:
        seen = status(training(0), task("evaluator:0", "running"))
        bars = [
            Unfinished(TaskId(*name), b"%s | " % name[0].encode(), b"10% ###")
            for name in (("worker", 0), ("evaluator", 0))
        ]
        assert Picture(seen).lines(80, 24, *bars)[1:2] == ["evaluator | 10% ###"]
        assert not any(line.startswith("worker |") for line in Picture(seen).lines(80, 24, *bars))

    @pytest.mark.parametrize(
        "text",
        [
            "\x1b[2J\x1b[H",
            "a\nb\nc",
            "\x9b31m",
            "x" * 3000,
            "漢字" * 40,
            "[red]not markup[/red]",
            "\u202ereversed",
            "\t" * 30,
            "e\u0301" * 50,
            "👩‍👩‍👧" * 20,
        ],
    )
    @pytest.mark.parametrize("columns", [80, 41])
    def test_the_live_view_survives_control_characters_and_overlong_text(self, text: str, columns: int) -> None:
        """The text is a task's state, a run's name, or a task's unfinished line."""
        seen = status(task("worker:0", text), training(1, metrics={"loss": None}), name=text)
        bar = Unfinished(TaskId("ps", 0), b"ps:0 | ", text.encode())
        lines = Picture(seen, colour=True).lines(columns, 24, bar)
        screen = screen_of(columns, 24, lines)
        assert "".join(screen.display[0]).startswith("log")
        shown = [line.rstrip() for line in screen.display]
        assert shown[1].startswith("── ")
        assert any(line.startswith("2 worker:1 ") for line in shown)
        assert not any(shown[len(lines) + 1 :])
        assert not any("\x1b" in line or "\n" in line for line in Picture(seen).lines(columns, 24))


def test_a_progress_bar_is_full_at_100_percent_and_never_longer() -> None:
    assert [render_bar(share, 4) for share in (0, 0.13, 0.5, 1, 7)] == ["────", "╸───", "━━──", "━━━━", "━━━━"]


class TestStepHistory:
    def test_step_rates_are_constant_for_regular_steps_and_zero_after_the_last(self) -> None:
        history = StepHistory()
        for second in range(0, 90, 5):  # a step takes longer than the status is old
            history.note(NOW + second, second)
        assert history.rates(NOW + 86, 6) == pytest.approx([1.0] * 6)
        stopped = history.rates(NOW + 125, 6)
        assert stopped[-4:] == [0.0] * 4
        assert render_spark(stopped, 6).rstrip() == render_spark(stopped, 6)[:2]

    def test_step_rates_ignore_steps_before_a_restart(self) -> None:
        history = StepHistory()
        for second, step in enumerate([100, 110, 120, 1, 3, 5, 7, 9]):
            history.note(NOW + second, step)
        assert set(history.rates(NOW + 7, 30)) == {2.0}

    def test_the_step_history_keeps_only_the_last_minute(self) -> None:
        history = StepHistory()
        for second in range(10_000):
            history.note(NOW + second, second)
        assert len(history._times) <= 62

    def test_a_sparkline_has_exactly_the_requested_width(self) -> None:
        assert render_spark([1.0, 4.0, 8.0, 0.0], 6) == "  ▂▅█ "


class Terminal:
    """Receives what a sink writes, as one packet for each write, so that writes can be told apart."""

    def __init__(self) -> None:
        self.now = 100.0
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.sink = TerminalSink(self._theirs.fileno(), clock=lambda: self.now, term="xterm")

    def writes(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self._ours.recv(1 << 20))
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


class TestSink:
    def test_a_live_frame_is_one_write_that_includes_pending_lines(self, terminal: Terminal) -> None:
        terminal.sink.show_live(["live"])
        assert len(terminal.writes()) == 1
        terminal.sink.write(b"one\n")
        terminal.sink.note("two")
        terminal.sink.show_live(["alive"])
        assert terminal.writes() == []
        terminal.now += FRAME_S
        terminal.sink.show_live(["alive"])
        [frame] = terminal.writes()
        assert frame.index(b"\x1b[J") < frame.index(b"one\ntwo\n") < frame.index(b"alive")
        assert (frame[:8], frame[-8:]) == (b"\x1b[?2026h", b"\x1b[?2026l")

    def test_live_frames_are_limited_to_four_a_second_and_skipped_if_unchanged(self, terminal: Terminal) -> None:
        for number in range(100):
            terminal.sink.write(b"line %d\n" % number)
            terminal.sink.show_live([f"live {number}"])
            terminal.now += 0.02
        assert len(terminal.writes()) <= 8
        terminal.now += 1
        terminal.sink.show_live(["live"])
        terminal.writes()
        terminal.now += 1
        terminal.sink.show_live(["live"])
        assert terminal.writes() == []

    def test_lines_are_written_immediately_without_a_live_view(self, terminal: Terminal) -> None:
        for number in range(3):
            terminal.sink.write(b"line\n")
            terminal.sink.show_live([])
            assert terminal.writes() == [b"line\n"], number

    def test_a_flood_of_output_is_written_immediately_without_a_live_frame(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("launcher.console.terminal.PENDING_LIMIT", 64 << 10)  # as much as one packet can hold
        terminal.sink.show_live(["live"])
        terminal.writes()
        terminal.sink.write(b"x" * 99 + b"\n")
        terminal.sink.write((b"y" * 63 + b"\n") * 1024)
        terminal.sink.show_live(["live"])
        [flood] = terminal.writes()
        assert flood.startswith(b"\r\x1b[Jxxx")
        assert b"live" not in flood
        terminal.now += FRAME_S
        terminal.sink.show_live(["live"])
        [frame] = terminal.writes()
        assert b"live" in frame

    def test_a_forgotten_live_view_is_not_erased_from_the_terminal(self, terminal: Terminal) -> None:
        terminal.sink.show_live(["live"])
        terminal.writes()
        terminal.sink.forget()
        terminal.sink.show_live([])
        assert terminal.writes() == [b"\x1b[?25h"]


def test_a_live_view_that_raises_an_error_loses_no_output_line() -> None:
    region = LiveRegion(colour=False)
    area = LiveArea(region, colour=False, is_ours=lambda: True)

    def fail() -> Seen:
        raise ValueError("no status")

    region.look = fail
    reading, writing = os.pipe()
    sink = TerminalSink(writing, term="")
    sink.write(b"line\n")
    area.draw(sink, [])
    assert os.read(reading, 4096).partition(b"\x1b[?7l")[0].endswith(b"line\n")
    area.is_hidden = True
    sink.hide()
    os.close(reading)
    os.close(writing)


class TestKeys:
    @pytest.fixture
    def done(self) -> list[str]:
        return []

    @pytest.fixture
    def region(self) -> LiveRegion:
        picture = Picture(status(*(training(number) for number in range(12))))
        picture.lines()
        return picture.region

    @pytest.fixture
    def keys(self, region: LiveRegion, done: list[str]) -> Keys:
        actions = KeyActions(
            stop=lambda: done.append("stop"),
            stop_text="stop the run",
            stop_question="Stop the run? y/n",
            detach=lambda: done.append("detach"),
            stacks=lambda: done.append("stacks"),
            show_only=lambda task: done.append(f"only {task}"),
        )
        return Keys(region, actions)

    @pytest.mark.parametrize(
        ("typed", "does"),
        [
            (b"qy", ["stop"]),
            (b"qn", []),
            (b"qd", []),
            (b"qny", []),
            (b"d", ["detach"]),
            (b"s", ["stacks"]),
            (b"2a", ["only worker:1", "only "]),
            (b"l12\r", ["only worker:11"]),
            (b"l13\r", []),
            (b"lworker:7\n", ["only worker:7"]),
            (b"l1x\x7f1\n", ["only worker:10"]),
            (b"l12\x1bs", ["stacks"]),
            (b"lqy\x1b", []),
            (b"\x1b[A\x1bOP\x1b[15~\x1b[1;5D", []),  # arrows, F1, F5, Ctrl and an arrow
            ("é漢\x00".encode(), []),
            (b"?s", []),
            (b"?q", []),
            (b"?qy", ["stop"]),
        ],
    )
    def test_each_key_of_the_live_view_triggers_its_action(
        self, keys: Keys, done: list[str], typed: bytes, does: list[str]
    ) -> None:
        keys.press(typed)
        assert done == does

    def test_the_live_view_shows_key_help_and_confirmation_questions(self, keys: Keys, region: LiveRegion) -> None:
        assert region.lines(Size(80, 24), ())[0].endswith(" ? keys ──")
        keys.press(b"q")
        assert region.lines(Size(80, 24), ())[1] == "Stop the run? y/n"
        keys.press(b"n?")
        shown = "\n".join(region.lines(Size(80, 24), ()))
        assert "stacks of all tasks" in shown
        assert "detach; the run continues" in shown
        assert "worker:0" not in shown
        keys.press(b"x2")
        assert " · only worker:1 " in region.lines(Size(80, 24), ())[0]
        assert region.lines(Size(80, 24), ())[2].startswith("1 worker:0 ")
        keys.press(b"l4")
        assert region.lines(Size(80, 10), ())[1].startswith("Only the log of task 4_")


def test_the_screen_of_the_tests_keeps_its_last_rows_when_it_shrinks() -> None:
    """`Screen` is the tests' own: terminals keep the last rows, but pyte does not."""
    screen = Screen(10, 4)
    for number in range(4):
        screen.draw(str(number))
        if number < 3:
            screen.linefeed()
            screen.carriage_return()
    screen.resize(2, 10)
    assert [line.strip() for line in screen.display] == ["2", "3"]
