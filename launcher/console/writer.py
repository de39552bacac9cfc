"""The only writer to the terminal: one thread, which reads the tasks' log files at its own pace.

What tasks print goes to stdout, line by line as `worker:1 │ text`; our own words go to stderr. Because the thread
reads files, a slow terminal holds up nothing else, and memory stays bounded whatever the tasks print.
"""

from __future__ import annotations

import enum
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import click

from launcher.console.log_lines import LogLines
from launcher.console.terminal import NowhereSink, PlainSink, Sink, TerminalSink
from launcher.printable import printable
from launcher.tasks import TaskId
from worker_entry.system.file_holes import end_of_hole, render_bytes

POLL_S = 0.05
BUSY_PAUSE_S = 0.01
"""The same while tasks print faster than anybody can read: to show it must not take the processor from training.
What has piled up is shown without a pause once a note is due, or the end."""
NOTES_LIMIT = 1000
"""Lines of our own that wait to be written."""
PIECE = 64 << 10
"""Bytes of a log that are read at once."""
ZEROS = 512
"""Zeros in a row from which on they are left out: a program that cuts its log to a greater length leaves terabytes."""
PROGRESS_S = 10.0
"""In a pipe, how often a line that is not finished (a progress bar, say) is shown as it is."""
HURRY_S = 1.0
_COLOURS = (
    "cyan",
    "yellow",
    "green",
    "magenta",
    "blue",
    "bright_cyan",
    "bright_yellow",
    "bright_green",
    "bright_magenta",
    "bright_blue",
)


class _Order(enum.Enum):
    END_LOGS = "end the logs"
    CLOSE = "close"


class Console:
    """Follows logs and takes notes; everything is written by its own thread, in `close` at the latest.

    Args:
        sink: where to write.
        tasks: all tasks, for the width of the labels.
        colour: whether to colour labels and our own words.
        verbose: whether TensorFlow's start-up chatter is shown.
        clock: seconds, for the pace of unfinished lines.
    """

    def __init__(
        self,
        sink: Sink,
        tasks: Sequence[TaskId] = (),
        *,
        colour: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._colour = colour
        self._verbose = verbose
        self._clock = clock
        self._width = max((len(str(task)) for task in tasks), default=0)
        self._order = {task: index for index, task in enumerate(tasks)}
        self._logs: list[_FollowedLog] = []
        self._said: set[str] = set()
        self._orders: queue.SimpleQueue[tuple[TaskId, Path] | str | _Order] = queue.SimpleQueue()
        self._left_out = 0
        """Notes that were not taken."""
        self._broken = threading.Event()
        self._hurried: float | None = None
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, task: TaskId, path: Path) -> None:
        """Shows what the log at `path` has and will have, from its beginning."""
        self._orders.put((task, path))

    def note(self, text: str) -> None:
        """A line of our own, on stderr, after what the tasks have printed so far.

        Much of it is the words of others: what a terminal would obey has a stand-in. With too many waiting for a
        terminal that does not read, it is left out, and counted.
        """
        self._put(printable(text))

    def note_once(self, text: str) -> None:
        """The same, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            self.note(text)

    def warn(self, text: str) -> None:
        self._put(self._style(f"Warning: {printable(text)}", fg="yellow"))

    def error(self, text: str) -> None:
        first, line_break, rest = printable(text).partition("\n")
        self._put(self._style(first, fg="red") + line_break + rest)

    def _put(self, text: str) -> None:
        if self._orders.qsize() < NOTES_LIMIT:
            self._orders.put(text)
        else:
            self._left_out += 1

    def end_logs(self) -> None:
        """Nothing more is coming from the tasks: their last lines go before what is noted from now on."""
        self._orders.put(_Order.END_LOGS)

    def close(self) -> None:
        """Returns when everything is written, or a little after `hurry`: a reader that is stuck takes nothing."""
        self._orders.put(_Order.CLOSE)
        while self._thread.is_alive():
            self._thread.join(POLL_S)
            if self._hurried is not None and time.monotonic() > self._hurried + HURRY_S:
                return

    def hurry(self) -> None:
        """The user does not want to wait for `close`."""
        if self._hurried is None:
            self._hurried = time.monotonic()

    @property
    def broken(self) -> bool:
        """Whether nobody reads our output any more (`distlaunch … | head`)."""
        return self._broken.is_set()

    # --- the thread ---

    def _run(self) -> None:
        grown = False
        while True:
            try:
                order = self._orders.get(timeout=BUSY_PAUSE_S if grown else POLL_S)
            except queue.Empty:
                grown = self._show_new()
                continue
            if isinstance(order, tuple):
                self._logs.append(self._open(*order))
                continue
            # What was printed before a note is shown before it; what is printed meanwhile must not hold it up.
            ends = [(log, log.size()) for log in self._logs]
            while any(log.shown < end for log, end in ends) and self._show_new():
                pass
            if isinstance(order, str):
                self._show_note(order)
                if self._left_out and self._orders.qsize() < NOTES_LIMIT // 2:
                    count, self._left_out = self._left_out, 0
                    self._show_note(f"({count:,} more lines were left out: nobody has read them in time)")
                continue
            for log in self._logs:
                self._finish(log)
            self._logs.clear()
            if order is _Order.CLOSE:
                break
        self._out(lambda sink: sink.close())

    def _show_note(self, text: str) -> None:
        self._out(lambda sink: sink.note(text))

    def _out(self, write: Callable[[Sink], None]) -> None:
        try:
            write(self._sink)
        except OSError:
            self._sink = NowhereSink()
            self._broken.set()

    def _open(self, task: TaskId, path: Path) -> _FollowedLog:
        colour = _COLOURS[self._order.get(task, 0) % len(_COLOURS)]
        label = self._style(f"{task!s:<{self._width}} │ ", fg=colour).encode()
        return _FollowedLog(path, label, LogLines(keep_colours=self._colour, fold=not self._verbose))

    def _show_new(self) -> bool:
        """Shows one piece of every log that has grown; returns whether any had."""
        if self.broken:
            return False
        grown = False
        for log in self._logs:
            before = log.shown
            data = log.read()
            grown = grown or log.shown > before
            if data:
                self._show_zeros(log)
                self._write(log, log.lines.feed(data))
        unfinished = [(log, text) for log in self._logs if (text := log.lines.unfinished)]
        if self._sink.has_live_lines:
            live = [(log.label + text).decode("utf-8", "replace") for log, text in unfinished]
            self._out(lambda sink: sink.show_live(live))
        else:
            self._show_progress(unfinished)
        return grown

    def _show_progress(self, unfinished: Sequence[tuple[_FollowedLog, bytes]]) -> None:
        now = self._clock()
        for log, text in unfinished:
            if log.unfinished_since is None:  # most lines are finished a moment later
                log.unfinished_since = now
            elif text != log.progress and now - log.unfinished_since >= PROGRESS_S:
                self._write(log, [text])
                log.progress, log.unfinished_since = text, now

    def _write(self, log: _FollowedLog, lines: Sequence[bytes]) -> None:
        if lines:
            text = log.label + (b"\n" + log.label).join(lines) + b"\n"
            self._out(lambda sink: sink.write(text))

    def _show_zeros(self, log: _FollowedLog) -> None:
        zeros = log.take_zeros()
        if zeros:
            self._write(log, [self._style(f"({render_bytes(zeros)} of zeros left out)", dim=True).encode()])

    def _finish(self, log: _FollowedLog) -> None:
        self._show_zeros(log)
        self._write(log, log.lines.close())
        if log.lines.folded:
            count = "1 line" if log.lines.folded == 1 else f"{log.lines.folded:,} lines"
            self._write(log, [self._style(f"({count} of TensorFlow's chatter in the log only)", dim=True).encode()])
        log.close()

    def _style(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._colour else text


class _FollowedLog:
    """One task's log as far as it has been shown."""

    def __init__(self, path: Path, label: bytes, lines: LogLines) -> None:
        self.label = label
        self.lines = lines
        self.shown = 0
        """Bytes read so far."""
        self.progress = b""
        """What was last shown of the line that has not ended."""
        self.unfinished_since: float | None = None
        """When that line, or this about it, was first seen."""
        self._path = path
        self._zeros = 0
        self._file: IO[bytes] | None = None

    def read(self) -> bytes:
        """The next piece, without the zeros that begin or end it; empty if there is none yet."""
        try:
            if self._file is None:
                self._file = self._path.open("rb", buffering=0)
            piece = self._file.read(PIECE)
            data = piece.lstrip(b"\0")
            zeros = len(piece) - len(data)
            if zeros < ZEROS and not self._zeros:
                data, zeros = piece, 0
            elif not data and len(piece) == PIECE:
                zeros = max(end_of_hole(self._file.fileno(), self.shown) - self.shown, PIECE)
            text = data.rstrip(b"\0")
            data = text if len(data) - len(text) >= ZEROS else data
            if len(data) < len(piece):
                self._file.seek(self.shown + zeros + len(data))
        except OSError:  # the task has not been started yet, or we have too many files open just now
            return b""
        self.shown += zeros + len(data)
        self._zeros += zeros
        if b"\n" in data:
            self.progress, self.unfinished_since = b"", None
        return data

    def take_zeros(self) -> int:
        """How many zeros were left out before the last piece."""
        zeros, self._zeros = self._zeros, 0
        return zeros

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def open_console(tasks: Sequence[TaskId], *, verbose: bool) -> Console:
    """The console of this process: live and coloured on a terminal (unless NO_COLOR is set), plain elsewhere."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    make = TerminalSink if is_terminal else PlainSink
    colour = is_terminal and not os.environ.get("NO_COLOR")
    # Streams of our own: Python flushes its own ones when it ends, and would wait there for a reader that is stuck,
    # and complain of one that is gone.
    stdout = os.fdopen(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
    stderr = os.fdopen(sys.stderr.fileno(), "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    return Console(make(stdout, stderr), tasks, colour=colour, verbose=verbose)
