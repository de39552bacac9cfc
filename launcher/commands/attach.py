"""Shows the output of a run as its foreground does, from the last screenful on."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from launcher.commands.logs import write_all
from launcher.console.keyboard import Keyboard, held, single_keys, suspending
from launcher.console.labels import Labels, prefix_lines, style_message
from launcher.console.log_lines import LogLines
from launcher.errors import DistlaunchError
from launcher.plan.paths import RunPaths
from launcher.report.journal_line import Line
from launcher.rundir.directory import RunDir
from launcher.rundir.follow import RunWatch, wait_for_changes
from launcher.rundir.journal_reading import JournalReader
from launcher.rundir.logs import Block, LogChoice, LogReader, find_logs
from launcher.rundir.record import RecordedRun
from launcher.tasks import TaskId, parse_task_id

if TYPE_CHECKING:
    from launcher.console.writer import Console

CHATTER = 4
"""How many lines are read for each shown line, because TensorFlow's start-up messages are not shown."""


class Left(Exception):  # noqa: N818 - no error
    """The user has detached."""


class _Line(NamedTuple):
    """A line of the first screenful, for stdout or stderr."""

    time: float
    descriptor: int
    text: bytes


class Attachment:
    """Shows a run on stdout and stderr.

    Args:
        files: the run's folder.
        colour: whether the terminal gets colours.
        verbose: whether all of TensorFlow's messages are shown.
        live: whether a terminal gets the live view.
    """

    def __init__(self, files: RunDir, *, colour: bool, verbose: bool, live: bool) -> None:
        self.run = RunWatch(files)
        self._files = files
        self._colour = colour
        self._verbose = verbose
        self._live = live
        self._rows = max(_count_rows() - 1, 5)
        self._reader = LogReader(files, LogChoice(tail=self._rows * CHATTER))
        self._tasks = read_tasks(files)

    def show(self) -> None:
        """Returns when the run is over and everything is shown.

        Raises:
            Left: the user has typed `q` or `d`.
            KeyboardInterrupt: the user has typed Ctrl-C.
            OSError: the reader of our output is gone.
        """
        over = self.run.is_over()
        recorded, journal = RecordedRun(self._files).read_journal()
        blocks = self._reader.read(None if over else time.time())
        lines = [*heapq.merge(self._render_own(recorded), self._render(blocks), key=lambda line: line.time)]
        for descriptor, group in groupby(lines[-self._rows :], key=lambda line: line.descriptor):
            write_all(descriptor, b"".join([line.text for line in group]))
        if not over:
            self._follow(journal)

    def _render(self, blocks: Iterable[Block]) -> Iterator[_Line]:
        labels = Labels(self._tasks, colour=self._colour)
        shown: dict[TaskId, LogLines] = {}
        for block in blocks:
            if block.task not in shown:
                shown[block.task] = LogLines(keep_colours=self._colour, fold=not self._verbose)
            for line in shown[block.task].feed(block.data).splitlines(keepends=True):
                yield _Line(block.time or 0.0, sys.stdout.fileno(), prefix_lines(labels.of(block.task), line))

    def _render_own(self, recorded: Iterable[Line]) -> Iterator[_Line]:
        for entry in recorded:
            if (message := entry.message) is not None:
                text = style_message(message.level, message.text, colour=self._colour)
                for line in text.encode("utf-8", "backslashreplace").splitlines():
                    yield _Line(entry.time, sys.stderr.fileno(), line + b"\n")

    def _follow(self, journal: JournalReader) -> None:
        with contextlib.ExitStack() as opened:
            # An import may swallow or replace the exceptions of signal handlers.
            with held({signal.SIGINT, signal.SIGTERM}):
                from launcher.console.opening import open_console  # after the first screenful is shown

                console = open_console(self._tasks, verbose=self._verbose, live=self._live)
                opened.enter_context(_closed_at_the_end(console))
                live = _Live(self._files, console, self._reader)
                keyboard = opened.enter_context(single_keys())
                press = opened.enter_context(_keys_of(console, self._files, keyboard))

                def pause() -> None:
                    console.pause()
                    keyboard.give_back()

                def resume() -> None:
                    keyboard.allow()
                    console.resume()

                opened.enter_context(suspending(pause, resume))
            self._look(live, journal, keyboard, press)

    def _look(self, live: _Live, journal: JournalReader, keyboard: Keyboard, press: Callable[[bytes], None]) -> None:
        stdout, readable = sys.stdout.fileno(), keyboard.readable
        for wakeup in wait_for_changes(self.run, lambda: live.paths, stdout=stdout, readable=readable):
            keyboard.take()
            live.show(journal)
            if live.console.broken:
                _break_off()
            for descriptor in wakeup.readable:
                press(os.read(descriptor, 64))


@contextlib.contextmanager
def _closed_at_the_end(console: Console) -> Iterator[None]:
    try:
        yield
    except BaseException:
        console.hurry()
        raise
    finally:
        console.close()


@contextlib.contextmanager
def _keys_of(console: Console, files: RunDir, keyboard: Keyboard) -> Iterator[Callable[[bytes], None]]:
    """Yields the handler of keys. The live view, if the console has one, shows the run's status meanwhile."""
    if console.region is None:
        yield lambda data: _leave() if not data or b"q" in data.lower() else None
        return
    from launcher.commands.requests import ask_stacks
    from launcher.commands.status_watch import watched_status
    from launcher.console.keys import KeyActions, Keys

    def show_stacks() -> None:
        try:
            console.note(ask_stacks(files).rstrip())
        except DistlaunchError as error:
            console.warn(error.sentence)

    actions = KeyActions(
        stop=_leave,
        stop_text="detach; the run continues",
        detach=_leave,
        stacks=lambda: threading.Thread(target=show_stacks, name="stacks", daemon=True).start(),
        show_only=lambda task: console.show_only(parse_task_id(task) if task else None),
    )
    keys = Keys(console.region, actions, has_keys=keyboard.exists)

    def press(data: bytes) -> None:
        if not data:
            _leave()
        keys.press(data)
        console.redraw()

    with watched_status(files) as watch:
        console.region.look = watch.seen
        yield press


class _Live:
    """Lets a console follow the logs of the last attempt, from the position of `reader`."""

    def __init__(self, files: RunDir, console: Console, reader: LogReader) -> None:
        self.console = console
        self._files = files
        self._attempt = reader.attempt
        self._followed = set(reader.logs)
        for task, log in reader.logs.items():
            console.follow(task, log.path, log.position - log.unread())
        reader.close()

    @property
    def paths(self) -> list[Path]:
        """The files and folders whose changes matter; the console polls the logs itself."""
        return [self._files.root, self._files.events, self._files.attempt(self._attempt)]

    def show(self, journal: JournalReader) -> None:
        """Shows new messages of distlaunch, and follows new logs."""
        for entry in journal.read():
            if (message := entry.message) is not None:
                self.console.say(message.level, message.text)
        self._follow_new()
        while self._files.attempt(self._attempt + 1).is_dir():
            self.console.end_logs()
            self._attempt, self._followed = self._attempt + 1, set()
            self._follow_new()

    def _follow_new(self) -> None:
        for task, path in find_logs(self._files.attempt(self._attempt)).items():
            if task not in self._followed and not task.is_auxiliary:
                self._followed.add(task)
                self.console.follow(task, path)


def _leave() -> NoReturn:
    raise Left


def _break_off() -> NoReturn:
    raise BrokenPipeError


def _count_rows() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).lines
    except OSError:
        return 24


def read_tasks(files: RunPaths) -> list[TaskId]:
    """The tasks of the run's plan, in the plan's order; empty if the plan cannot be read."""
    return [each.task for each in RecordedRun(files).plan.tasks if not each.task.is_auxiliary]


def end_as_left(*_: object) -> NoReturn:
    """Handles SIGTERM: exits, which restores the terminal."""
    sys.exit(128 + signal.SIGTERM)
