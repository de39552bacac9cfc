"""Sets up patches, step counting and stack dumps in a Python process that a task starts.

A task may have many such processes: a wrapper, a process that trains, its data loaders. The first process that begins
to train reports its progress until it exits. Child processes write to separate files, never to the task's own; the
agent uses the separate files if the task's own process reports nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from typing import Any

from worker_entry.hooks import jax_cluster
from worker_entry.protocol import child_order, environment
from worker_entry.protocol.file_names import LOCK
from worker_entry.task import keras_progress, runner, status_file
from worker_entry.task.meter import install as install_meter


class _Reporter(status_file.StatusFile):
    """A status file that is opened at the first report, unless another process of the task holds its lock."""

    def __init__(self, file: str) -> None:
        self._path = file
        self._writer_pid = 0

    def _write(self, **changes: Any) -> None:
        if self._writer_pid != os.getpid():
            if not _lock(f"{self._path}{LOCK}"):
                return
            self._writer_pid = os.getpid()
            super().__init__(self._path)
        super()._write(**changes)


def install(text: str) -> None:
    """Applies the task's order to this process; called just before it imports its framework or reports steps."""
    order = child_order.parse_order(text)
    if order.stacks_file is not None:
        status_file.dump_on_signal(order.stacks_file)
    joining = jax_cluster.UNNOTED
    if order.status_file is not None and _is_task():
        joining = runner.report_phases(status_file.StatusFile(order.status_file))
    if order.progress and order.child_file is not None:
        meter = runner.make_meter(_Reporter(order.child_file))
        install_meter(meter)
        keras_progress.install(meter)
    if order.child_crash_file is not None and not _is_task():
        _watch_end(order.child_crash_file)
    # A program may have many multiprocessing processes, such as data loaders, and has already logged the patches.
    runner.patch_libraries(order, joining=joining, quiet=_is_of_multiprocessing())


def record(text: str, error: BaseException) -> None:
    """Records the exception that ends the task's own process."""
    order = child_order.parse_order(text)
    if order.crash_file is not None:
        runner.write_crash(order.crash_file, error)


def remember_interrupt(error: BaseException) -> None:
    """Makes the interpreter end by SIGINT after a KeyboardInterrupt.

    The interpreter forgets the interrupt when it executes source text. So call this last in a hook for uncaught
    exceptions, which may import modules.
    """
    if isinstance(error, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - only such an exception tells it


def _is_task() -> bool:
    """Whether this is the task's own process, not one of its children."""
    starter = os.environ.get(environment.CHILDREN, "").partition(" ")[0]
    return starter.isdigit() and os.getppid() == int(starter)


def _is_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")
    # A child process gets its name before it imports the program, but knows its parent only later.
    return process is not None and process.current_process().name != "MainProcess"


def _watch_end(file: str) -> None:
    """Records the exception that ends this process: it may end the task, too, for example through a shell script."""
    show, process = sys.excepthook, os.getpid()

    def record_and_show(kind: Any, error: BaseException, trace: Any) -> None:
        if os.getpid() == process:  # not in a child that the program has forked
            runner.write_crash(file, error)
        show(kind, error, trace)
        remember_interrupt(error)

    sys.excepthook = record_and_show


def _lock(file: str) -> bool:
    """Takes the lock until this process exits; False if another process holds it. Forked children do not inherit it."""
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
