"""Gives a Python that a task has started what the task itself would have: patches, counted steps, stacks.

A task may have many such processes: a wrapper, the one that trains, its data loaders. The one that trains tells how far
it is: the first that begins to, for as long as it lives. What they write goes into files of their own, never the
task's; the agent makes something of it where the task's own process has nothing to say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from typing import Any

from worker_entry.hooks import collective_time
from worker_entry.protocol import child_order, environment
from worker_entry.protocol.file_names import LOCK
from worker_entry.task import keras_progress, runner, status_file
from worker_entry.task.meter import Meter
from worker_entry.task.meter import install as install_meter


class _Reporter(status_file.StatusFile):
    """Tells once there is something to tell, unless another process of the task does so already."""

    def __init__(self, file: str) -> None:
        self._path = file
        self._speaker = 0

    def _write(self, **changes: Any) -> None:
        if self._speaker != os.getpid():
            if not _lock(f"{self._path}{LOCK}"):
                return
            self._speaker = os.getpid()
            super().__init__(self._path)
        super()._write(**changes)


def install(text: str) -> None:
    """From now on, this process does what its task's order says; TensorFlow is about to be imported, or steps begin."""
    order = child_order.parse_order(text)
    if order.stacks_file is not None:
        status_file.dump_on_signal(order.stacks_file)
    if order.status_file is not None and _is_task():
        status_file.report_phases(status_file.StatusFile(order.status_file))
    if order.progress and order.child_file is not None:
        meter = Meter(_Reporter(order.child_file), collective_time.CollectiveClock().waited_s)
        install_meter(meter)
        keras_progress.install(meter)
    if order.child_crash_file is not None and not _is_task():
        _watch_end(order.child_crash_file)
    # A program may have many of these, to load its data, say, and has logged the same already.
    runner.patch_libraries(order, quiet=_is_of_multiprocessing())


def record(text: str, error: BaseException) -> None:
    """Called in the task's own process: this ends it."""
    order = child_order.parse_order(text)
    if order.crash_file is not None:
        runner.write_crash(order.crash_file, error)


def _is_task() -> bool:
    """Whether this is the process that the agent has started, and not one that was started in there."""
    starter = os.environ.get(environment.CHILDREN, "").partition(" ")[0]
    return starter.isdigit() and os.getppid() == int(starter)


def _is_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    # Which has its name before it imports the program; its parent it knows later.
    return process is not None and process.current_process().name != "MainProcess"


def _watch_end(file: str) -> None:
    """Records what ends this process, in case that ends the task as well: a shell script goes no further, say."""
    show, process = sys.excepthook, os.getpid()

    def record_and_show(kind: Any, error: BaseException, trace: Any) -> None:
        if os.getpid() == process:  # not in a child that the program has forked
            runner.write_crash(file, error)
        show(kind, error, trace)

    sys.excepthook = record_and_show


def _lock(file: str) -> bool:
    """Takes the lock for as long as this process lives; false if another has it. Those that it forks do not have it."""
    with contextlib.suppress(OSError):
        descriptor = status_file.open_out_of_the_way(file, os.O_RDWR | os.O_CREAT)
        if descriptor is not None:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            return True
    return False
