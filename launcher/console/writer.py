"""The only writer to the terminal: one thread that reads the tasks' log files at its own pace.

Task output goes to stdout, line by line as `worker:1 │ text`; our messages go to stderr. Because the thread reads
files, a slow terminal delays nothing else, and memory stays bounded no matter how much the tasks print.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.console.followed_log import FollowedLog
from launcher.console.labels import Labels, prefix_lines, style_message, style_remark
from launcher.console.log_lines import LogLines, Tracebacks
from launcher.console.terminal import NowhereSink, Sink
from launcher.report.journal_line import Level
from launcher.tasks import TaskId
from launcher.wording import count_of
from worker_entry.protocol.units import render_size

if TYPE_CHECKING:
    from launcher.console.live_view import LiveRegion

POLL_S = 0.05
BUSY_PAUSE_S = 0.01
"""The pause while tasks print continuously: output must not starve training of CPU. Before a note, and at the end, the
backlog is shown without pauses."""
NOTES_LIMIT = 1000
"""Notes that may wait to be written."""
PROGRESS_S = 10.0
"""In a pipe, how often the current text of an unfinished line (a progress bar, for example) is shown."""
HURRY_S = 1.0
"""How long `close` waits for a stuck reader after `hurry`."""
PAUSE_S = 0.5
"""How long `pause` waits for a terminal that does not read."""


class _Order(enum.Enum):
    END_LOGS = "end the logs"
    LEAVE = "leave"
    CLOSE = "close"
    PAUSE = "pause"
    RESUME = "resume"
    DRAW = "draw"


class Console:
    """Follows logs and takes notes; a separate thread writes everything, in `close` at the latest.

    Args:
        sink: where the thread writes.
        tasks: all tasks, for the width of the labels.
        colour: whether labels and our own messages are coloured.
        verbose: whether TensorFlow's start-up chatter and details are shown.
        clock: seconds, for the interval of unfinished lines.
        record: also gets each message to the user, with its level.
        needed: whether the console is `broken` when its reader is gone.
        region: the live view of a terminal; None without a live view.
        is_ours: whether we may draw on the terminal; False while we are a background job of a shell.
    """

    def __init__(
        self,
        sink: Sink,
        tasks: Sequence[TaskId] = (),
        *,
        colour: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Level, str], None] = lambda _level, _text: None,
        needed: bool = True,
        region: LiveRegion | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._sink = sink
        self._colour = colour
        self._verbose = verbose
        self._clock = clock
        self._labels = Labels(tasks, colour=colour)
        self._record = record
        self._needed = needed
        self._area = LiveArea(region, colour=colour, is_ours=is_ours)
        self._only: TaskId | None = None
        self._tracebacks = Tracebacks(clock)
        self._paused = threading.Event()
        self._left = threading.Event()
        self._logs: list[FollowedLog] = []
        self._noted_once: set[str] = set()
        self._orders: queue.SimpleQueue[tuple[TaskId, Path, int] | str | _Order] = queue.SimpleQueue()
        self._left_out = 0
        """Notes that were dropped because too many waited."""
        self._broken = threading.Event()
        self._hurried: float | None = None
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, task: TaskId, path: Path, offset: int = 0) -> None:
        """Shows the log at `path` from this offset on, and follows it."""
        self._orders.put((task, path, offset))

    def note(self, text: str, *, record: str = "") -> None:
        """Writes a message to stderr, after what the tasks have printed so far.

        Control characters are replaced, since messages quote programs. If too many messages wait for a terminal that
        does not read, this one is dropped and counted. A long text is recorded as `record`.
        """
        self.say("note", text, record=record)

    def note_once(self, text: str) -> None:
        """Writes the message unless it was written before."""
        if text not in self._noted_once:
            self._noted_once.add(text)
            self.note(text)

    def detail(self, text: str) -> None:
        """Writes a message that only users who want more words need."""
        if self._verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        self.say("warning", text)

    def error(self, text: str) -> None:
        self.say("error", text)

    def say(self, level: Level, text: str, *, record: str = "") -> None:
        """Records the text, or `record` in its place; then writes the text as a note, a warning or an error."""
        self._record(level, record or text)
        self._put(style_message(level, text, colour=self._colour))

    def _put(self, text: str) -> None:
        if self._orders.qsize() < NOTES_LIMIT:
            self._orders.put(text)
        else:
            self._left_out += 1

    @property
    def region(self) -> LiveRegion | None:
        """The live view, if there is one."""
        return self._area.region

    def show_only(self, task: TaskId | None) -> None:
        """Shows the log of one task, or of all tasks, from now on; output hidden meanwhile is not shown later."""
        self._only = task
        self.redraw()

    def redraw(self) -> None:
        """Draws the live view soon, because it has changed."""
        self._orders.put(_Order.DRAW)

    def pause(self) -> None:
        """Erases the live lines until `resume`, before this process is suspended. Waits for PAUSE_S at most."""
        self._paused.clear()
        self._orders.put(_Order.PAUSE)
        self._paused.wait(PAUSE_S)

    def resume(self) -> None:
        self._orders.put(_Order.RESUME)

    def end_logs(self) -> None:
        """Writes the tasks' last lines before any later note; the tasks print nothing more."""
        self._orders.put(_Order.END_LOGS)

    def close(self) -> None:
        """Returns when everything is written, or HURRY_S after `hurry`, because a stuck reader never reads the rest."""
        self._orders.put(_Order.CLOSE)
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            if self._hurried is not None and time.monotonic() > self._hurried + HURRY_S:
                return

    def leave(self) -> None:
        """Writes the waiting output and nothing later: other programs use the terminal then. Waits at most HURRY_S."""
        self._orders.put(_Order.LEAVE)
        if not self._left.wait(HURRY_S):
            self.hurry()

    def hurry(self) -> None:
        """Limits how long `close` waits."""
        if self._hurried is None:
            self._hurried = time.monotonic()

    @property
    def broken(self) -> bool:
        """Whether the reader of our output is gone (`distlaunch … | head`)."""
        return self._needed and self._broken.is_set()

    # --- the thread ---

    def _run(self) -> None:
        grown = False
        while True:
            self._out(self._draw)
            try:
                order = self._orders.get(timeout=None if self._left.is_set() else BUSY_PAUSE_S if grown else POLL_S)
            except queue.Empty:
                grown = self._show_new()
                continue
            if order in (_Order.PAUSE, _Order.RESUME, _Order.DRAW):
                self._pause(order)
                continue
            if self._left.is_set() and order is not _Order.CLOSE:
                continue
            if isinstance(order, tuple):
                self._logs.append(self._open(*order))
                continue
            # First show the output from before the note; output that is printed meanwhile does not delay the note.
            ends = [(log, log.size()) for log in self._logs]
            while any(log.shown < end for log, end in ends) and self._show_new():
                pass
            if isinstance(order, str):
                self._out(methodcaller("note", order))
                if self._left_out and self._orders.qsize() < NOTES_LIMIT // 2:
                    count, self._left_out = self._left_out, 0
                    text = f"({count:,} lines left out: the terminal did not read them in time)"
                    self._out(methodcaller("note", text))
                continue
            for log in self._logs:
                self._finish(log)
            self._logs.clear()
            self._tracebacks = Tracebacks(self._clock)
            if order is _Order.LEAVE:
                self._out(methodcaller("close"))
                self._sink = NowhereSink()
                self._left.set()
            if order is _Order.CLOSE:
                break
        self._out(methodcaller("close"))

    def _pause(self, order: _Order) -> None:
        if order is _Order.PAUSE:
            self._area.is_hidden = True
            self._out(methodcaller("hide"))
            self._paused.set()
        elif order is _Order.RESUME:
            self._area.is_hidden = False

    def _draw(self, sink: Sink) -> None:
        self._area.draw(sink, filter(self._is_shown, self._logs))

    def _out(self, write: Callable[[Sink], None]) -> None:
        try:
            write(self._sink)
        except OSError:
            self._sink = NowhereSink()
            self._broken.set()

    def _open(self, task: TaskId, path: Path, offset: int) -> FollowedLog:
        lines = LogLines(keep_colours=self._colour, fold=not self._verbose, tracebacks=self._tracebacks)
        return FollowedLog(task, path, self._labels.of(task), lines, offset)

    def _show_new(self) -> bool:
        """Shows one piece of every log that has grown; returns whether any log has grown."""
        if self._broken.is_set():
            return False
        grown = False
        for log in self._logs:
            before = log.shown
            data = log.read()
            grown = grown or log.shown > before
            if data:
                self._show_zeros(log)
                self._write(log, log.lines.feed(data))
        if not self._sink.has_live_lines:
            self._show_progress()
        return grown

    def _is_shown(self, log: FollowedLog) -> bool:
        return self._only in (None, log.task)

    def _show_progress(self) -> None:
        now = self._clock()
        for log in self._logs:
            text = log.lines.unfinished
            if not text:
                continue
            if log.unfinished_since is None:  # most lines end a moment later
                log.unfinished_since = now
            elif text != log.progress and now - log.unfinished_since >= PROGRESS_S:
                self._write(log, text + b"\n")
                log.progress, log.unfinished_since = text, now

    def _write(self, log: FollowedLog, lines: bytes) -> None:
        if lines and self._is_shown(log):
            text = prefix_lines(log.label, lines)
            self._out(methodcaller("write", text))

    def _show_zeros(self, log: FollowedLog) -> None:
        zeros = log.take_zeros()
        if zeros:
            self._write(log, style_remark(f"({render_size(zeros)} of zeros left out)", colour=self._colour))

    def _finish(self, log: FollowedLog) -> None:
        self._show_zeros(log)
        self._write(log, log.lines.close())
        start_up, traceback = log.lines.folded - log.lines.folded_traceback, log.lines.folded_traceback
        for count, what in ((start_up, "TensorFlow's start-up messages"), (traceback, "another traceback")):
            if count:
                text = f"({count_of(count, 'line')} of {what} only in the log)"
                self._write(log, style_remark(text, colour=self._colour))
        log.close()


class LiveArea:
    """The area below the log lines, drawn on the console's thread: the live view, or the unfinished lines of tasks.

    Args:
        region: the live view; None without one.
        colour: whether unfinished lines keep their colours.
        is_ours: whether we may draw on the terminal; False while we are a background job of a shell.
    """

    def __init__(self, region: LiveRegion | None, *, colour: bool, is_ours: Callable[[], bool]) -> None:
        self.region = region
        self.is_hidden = False
        """Whether nothing is drawn, because this process is about to be suspended."""
        self._colour = colour
        self._is_ours = is_ours

    def draw(self, sink: Sink, logs: Iterable[FollowedLog]) -> None:
        """Shows the lines if the next picture is due; `logs`: the logs whose unfinished lines are shown."""
        if not sink.has_live_lines or not sink.is_due():
            return
        is_ours = self._is_ours()
        if not is_ours:
            sink.forget()
        sink.show_live(self._make_lines(sink, logs) if is_ours and not self.is_hidden else [])

    def _make_lines(self, sink: Sink, logs: Iterable[FollowedLog]) -> list[str]:
        # Imported here: a pipe needs no rich.
        from launcher.console.live_view import Unfinished, render_unfinished

        unfinished = [Unfinished(log.task, log.label, text) for log in logs if (text := log.lines.unfinished)]
        if self.region is not None:
            try:
                return self.region.lines(sink.size, unfinished)
            except Exception as error:  # noqa: BLE001 - a failed picture must not cost log lines or the run's verdict
                return [f"the live view has failed: {error!r}".partition("\n")[0]]
        return render_unfinished(unfinished, sink.size, colour=self._colour)
