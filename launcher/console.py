"""The only writer to the terminal: one thread, which reads the tasks' log files at its own pace.

What tasks print goes to stdout, line by line as `worker:1 │ text`; our own words go to stderr. Because the thread
reads files, a slow terminal holds up nothing else, and memory stays bounded whatever the tasks print.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from launcher.log_lines import LogLines
from launcher.tasks import TaskId
from launcher.terminal import NowhereSink, PlainSink, Sink, TerminalSink

POLL_S = 0.05
PIECE = 256 << 10
"""Bytes of a log that are read at once."""
PROGRESS_S = 10.0
"""In a pipe, how often a line that is not finished (a progress bar, say) is shown as it is."""
_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")


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
        self._orders: queue.SimpleQueue[tuple[TaskId, Path] | str | None] = queue.SimpleQueue()
        self._broken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def follow(self, task: TaskId, path: Path) -> None:
        """Shows what the log at `path` has and will have, from its beginning."""
        self._orders.put((task, path))

    def note(self, text: str) -> None:
        """A line of our own, on stderr, after what the tasks have printed so far."""
        self._orders.put(text)

    def warn(self, text: str) -> None:
        self.note(self._paint("33", f"Warning: {text}"))

    def error(self, text: str) -> None:
        first, line_break, rest = text.partition("\n")
        self.note(self._paint("31", first) + line_break + rest)

    def close(self) -> None:
        """Returns when everything is written."""
        self._orders.put(None)
        self._thread.join()

    @property
    def broken(self) -> bool:
        """Whether nobody reads our output any more (`distlaunch … | head`)."""
        return self._broken.is_set()

    # --- the thread ---

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._turn()
            except OSError:
                self._sink = NowhereSink()
                self._broken.set()

    def _turn(self) -> bool:
        try:
            order = self._orders.get(timeout=POLL_S)
        except queue.Empty:
            self._show_new()
            return True
        if isinstance(order, tuple):
            self._logs.append(self._open(*order))
            return True
        # What was printed before a note is shown before it.
        while self._show_new():
            pass
        if order is None:
            for log in self._logs:
                self._finish(log)
            self._sink.close()
            return False
        self._sink.note(order)
        return True

    def _open(self, task: TaskId, path: Path) -> _FollowedLog:
        colour = _COLOURS[self._order.get(task, 0) % len(_COLOURS)]
        label = self._paint(colour, f"{task!s:<{self._width}} │ ").encode()
        return _FollowedLog(path, label, LogLines(keep_colours=self._colour, fold=not self._verbose))

    def _show_new(self) -> bool:
        """Shows one piece of every log that has grown; returns whether any had."""
        grown = False
        for log in self._logs:
            data = log.read()
            if data:
                grown = True
                self._write(log, log.lines.feed(data))
        unfinished = [(log, text) for log in self._logs if (text := log.lines.unfinished)]
        if self._sink.has_live_lines:
            self._sink.show_live([(log.label + text).decode("utf-8", "replace") for log, text in unfinished])
        else:
            self._show_progress(unfinished)
        return grown

    def _show_progress(self, unfinished: Sequence[tuple[_FollowedLog, bytes]]) -> None:
        now = self._clock()
        for log, text in unfinished:
            if text != log.progress and now - log.progress_shown >= PROGRESS_S:
                # Not at its first sight: most lines are finished a moment later.
                if log.progress_shown:
                    self._write(log, [text])
                    log.progress = text
                log.progress_shown = now

    def _write(self, log: _FollowedLog, lines: Sequence[bytes]) -> None:
        if lines:
            self._sink.write(b"".join(log.label + line + b"\n" for line in lines))

    def _finish(self, log: _FollowedLog) -> None:
        self._write(log, log.lines.close())
        if log.lines.folded:
            count = "1 line" if log.lines.folded == 1 else f"{log.lines.folded:,} lines"
            self._write(log, [self._paint("2", f"({count} of TensorFlow's chatter in the log only)").encode()])
        log.close()

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


class _FollowedLog:
    """One task's log as far as it has been shown."""

    def __init__(self, path: Path, label: bytes, lines: LogLines) -> None:
        self.label = label
        self.lines = lines
        self.progress = b""
        self.progress_shown = 0.0
        self._path = path
        self._file: IO[bytes] | None = None

    def read(self) -> bytes:
        """The next piece; empty if there is none yet."""
        if self._file is None:
            try:
                self._file = self._path.open("rb", buffering=0)
            except FileNotFoundError:  # the task has not been started yet
                return b""
        return self._file.read(PIECE)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def open_console(tasks: Sequence[TaskId], *, verbose: bool) -> Console:
    """The console of this process: live and coloured on a terminal (unless NO_COLOR is set), plain elsewhere."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    make = TerminalSink if is_terminal else PlainSink
    colour = is_terminal and not os.environ.get("NO_COLOR")
    return Console(make(sys.stdout.buffer, sys.stderr), tasks, colour=colour, verbose=verbose)
