"""A cluster that a Python program starts, watches and stops."""

from __future__ import annotations

import contextlib
import html
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from launcher.commands.attach import read_tasks
from launcher.commands.requests import ask_stacks, ask_to_stop_now
from launcher.commands.status import read_status
from launcher.errors import DistlaunchError, UsageError
from launcher.gang.events import TaskStarted
from launcher.python.exchange import Order
from launcher.python.notebook import LiveOutput, is_notebook
from launcher.python.process import ControllerProcess
from launcher.python.specs import load_spec
from launcher.report.models import RunReport
from launcher.report.notebook import render_status
from launcher.report.run_events import Record, make_records
from launcher.report.status_report import RunStatus
from launcher.report.status_text import render_header
from launcher.rundir.directory import RunDir
from launcher.rundir.follow import RunWatch, wait_for_changes
from launcher.rundir.journal_reading import JournalReader
from launcher.rundir.logs import Block, LogChoice, LogReader
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId, TaskPattern, parse_task_id


class Cluster:
    r"""A run of a spec that lasts at most as long as a `with` block.

    The block begins when all tasks have been started, or when the run ends before that. The end of the block, also by
    an exception or Ctrl-C, stops the run and returns when all processes have ended; after Ctrl-C, or an interrupt of a
    notebook's kernel, programs get KeyboardInterrupt too, and this process continues. `distlaunch ls`, `attach` and the
    other commands work with the run. The class prints nothing and installs no signal handler. In a notebook, the block
    shows the tasks, and their last state when it ends.

    Args:
        spec: a spec, or the path of a spec file.
        run_dir: a new folder for the run's files; by default, a folder in the user's state directory.
        checks: whether to check the nodes before the start, as `distlaunch up` does.
        chaos: faults to inject, as the option `--chaos` takes them: `kill:worker:1@epoch=3`.

    Raises:
        SpecError: the spec file has errors.

    >>> spec = local_spec(command=["sh", "-c", "echo I am $DISTLAUNCH_TASK"], workers=2)
    >>> with Cluster(spec) as cluster:
    ...     print(*cluster.tasks)
    ...     print(*cluster.logs("worker:1"), sep="\n")
    ...     report = cluster.wait()
    worker:0 worker:1
    I am worker:1
    >>> report.outcome, report.exit_status
    ('succeeded', 0)
    """

    def __init__(
        self,
        spec: ClusterSpec | str | os.PathLike[str],
        *,
        run_dir: str | os.PathLike[str] | None = None,
        checks: bool = True,
        chaos: Sequence[str] = (),
    ) -> None:
        self.spec = spec if isinstance(spec, ClusterSpec) else load_spec(spec)
        self._run_dir = Path(run_dir) if run_dir is not None else None
        self._checks = checks
        self._chaos = chaos
        self._process: ControllerProcess | None = None
        self._live: LiveOutput | None = None

    def __repr__(self) -> str:
        """`<Cluster of two-nodes, not started>`, `<Cluster 20261127-…-two-nodes-ab12: running, attempt 1, 12 s>`."""
        status = self._find_status()
        if status is not None:
            return f"<Cluster {render_header(status)}>"
        return f"<Cluster of {self.spec.name}{', not started' if self._process is None else ''}>"

    def _repr_html_(self) -> str:
        """The current tasks, for a notebook."""
        return self._render_html() or f"<p>{html.escape(repr(self))}</p>"

    def __enter__(self) -> Cluster:
        """Starts the run.

        Raises:
            DistlaunchError: the run cannot be started; no process is left running.
        """
        if self._process is not None:
            raise RuntimeError("a Cluster can be started once; create another one")
        self._process = ControllerProcess(
            Order.of(self.spec, self._run_dir, checks=self._checks, parent=os.getpid(), chaos=self._chaos),
        )
        try:
            self._process.began.wait()
            if self._process.directory is not None:
                if is_notebook():
                    self._live = LiveOutput(self._render_html, self._process.over)
                self._wait_for_start()
            if self._process.over.is_set():
                self._process.result()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    @property
    def directory(self) -> Path:
        """The folder with the run's files; its name is the run's name."""
        return self._files.root

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """The tasks of the current attempt; `str(task)` is, for example, `worker:1`."""
        return tuple(read_tasks(self._files))

    def status(self) -> RunStatus:
        """The status of each task, as in `distlaunch status --json`.

        Raises:
            DistlaunchError: the controller does not answer.
        """
        return read_status(self._files)

    def stacks(self) -> str:
        """The Python stacks of all tasks, with equal stacks grouped; no task is stopped.

        Raises:
            DistlaunchError: the run is over, or its controller does not answer.
        """
        return ask_stacks(self._files)

    def events(self) -> Iterator[Record]:
        """Yields all events of the run from its beginning, and new events until the run ends.

        Each call starts from the first event. `launcher.report.run_events` defines the kinds of events.
        """
        files = self._files
        journal = JournalReader(files.events)
        for _ in wait_for_changes(RunWatch(files), lambda: [files.root, files.events]):
            yield from make_records(journal.read())

    def logs(self, task: TaskId | str, *, attempt: int | None = None) -> Iterator[str]:
        """The lines that a task prints, from the first until the end of the run, without line breaks.

        Bytes that are not UTF-8 are replaced. Otherwise, the lines are unchanged: they may contain carriage returns or
        colours.

        Args:
            task: the task, for example `worker:1`.
            attempt: the number of one attempt, from 1; by default, all attempts one after the other.

        Raises:
            UsageError: the run has no such task.
        """
        chosen = _find_task(task, self.tasks)
        reader = LogReader(self._files, LogChoice(patterns=[TaskPattern(*chosen)], attempt=attempt, timed=False))
        reader.attempt = attempt or 1
        return _read_lines(reader, RunWatch(self._files), follows=attempt is None)

    def wait(self, timeout_s: float | None = None) -> RunReport:
        """Waits for the end of the run; can also be called after the `with` block.

        A failed run raises no error: its report has the `outcome`, and the `verdict` with the cause.

        Raises:
            TimeoutError: the run has not ended after `timeout_s`.
            DistlaunchError: the run could not be started, or its controller was killed.
        """
        process = self._started
        if not process.over.wait(timeout_s):
            raise TimeoutError(f"the run {self.directory.name} is not over after {timeout_s:g} s")
        return process.result()

    def stop(self, *, now: bool = False) -> None:
        """Stops the run, and returns when all processes have ended; does nothing if the run is over.

        Tasks have `timeouts.stop_grace_s` to end by themselves; `now`, or Ctrl-C during this time, kills the tasks.
        """
        self._stop(signal.SIGTERM, now=now)

    def _end(self, error: BaseException | None) -> None:
        """Stops the run at the end of the block; after Ctrl-C, the programs get KeyboardInterrupt as well."""
        self._stop(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        if self._live is not None:
            self._live.close()

    def _stop(self, signum: int, *, now: bool = False) -> None:
        process = self._started
        try:
            process.ask_to_stop(signum)
            if now:
                self._hurry()
            process.over.wait()
        except BaseException:
            self._hurry()
            process.over.wait()
            raise

    def _hurry(self) -> None:
        """Ends the grace period. Uses the control socket, because two signals may be handled in either order."""
        if self._started.directory is not None:
            with contextlib.suppress(DistlaunchError):  # the run may have ended in the meantime
                ask_to_stop_now(self._files)

    @property
    def _started(self) -> ControllerProcess:
        if self._process is None:
            raise RuntimeError("the cluster has not been started; use `with Cluster(…) as cluster:`")
        return self._process

    @property
    def _files(self) -> RunDir:
        directory = self._started.directory
        if directory is None:
            raise RuntimeError("the run could not be started")
        return RunDir(directory)

    def _find_status(self) -> RunStatus | None:
        """The status; None if there is none, such as before the start, and while the run begins or ends."""
        if self._process is None or self._process.directory is None:
            return None
        with contextlib.suppress(DistlaunchError):
            return self.status()
        return None

    def _render_html(self) -> str | None:
        status = self._find_status()
        return render_status(status) if status is not None else None

    def _wait_for_start(self) -> None:
        """Waits until all tasks of an attempt have been started, or the run is over."""
        attempt, started = 0, set[TaskId]()
        for record in self.events():
            if record.attempt != attempt:
                attempt, started = record.attempt, set()
            if isinstance(record.event, TaskStarted):
                started.add(record.event.task)
                if started.issuperset(self.tasks):
                    return
        self._started.over.wait()


def _find_task(task: TaskId | str, tasks: tuple[TaskId, ...]) -> TaskId:
    try:
        found = parse_task_id(str(task))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if found not in tasks:
        raise UsageError(f"this run has no {found}; it has {', '.join(map(str, tasks))}")
    return found


def _read_lines(reader: LogReader, run: RunWatch, *, follows: bool) -> Iterator[str]:
    try:
        for wakeup in wait_for_changes(run, lambda: reader.paths):
            yield from _lines(reader.read(None if wakeup.over else time.time()))
            while follows and reader.is_behind():
                yield from _lines(reader.advance())
                yield from _lines(reader.read(time.time()))
            if reader.is_over():
                break
        yield from _lines(reader.read(None))
    finally:
        reader.close()


def _lines(blocks: Iterator[Block]) -> Iterator[str]:
    for block in blocks:
        yield from block.data.decode("utf-8", "replace").removesuffix("\n").split("\n")
