"""Writes a task's status file while the task runs, and its Python stacks on request.

Status and stacks go to files that the agent polls, so writing never waits for a reader.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import threading
from typing import Any, Optional

from worker_entry.hooks.import_hooks import after_import
from worker_entry.protocol.frozen import asdict, replace
from worker_entry.protocol.node_local import STACKS_SIGNAL
from worker_entry.protocol.strategy_names import JAX
from worker_entry.protocol.values import NOT_IMPORTED, KerasPatch, ModelDigest, Progress, TaskStatus
from worker_entry.system import clock

TENSORFLOW = "tensorflow"
LIBRARIES = {TENSORFLOW: "TensorFlow", JAX: "JAX"}
OUT_OF_THE_WAY = 200
"""Our descriptors begin here, so that the program's own begin at 3, as in plain Python."""


class StatusFile:
    """The status file of the program that this process runs.

    Each report overwrites the file in place with one small write; readers see the last report.
    """

    def __init__(self, file: str, not_forked: str = "") -> None:
        self._status = TaskStatus(NOT_IMPORTED, clock.now(), not_forked=not_forked)
        self._process = os.getpid()
        self._length = 0
        self._writing = threading.Lock()
        self._descriptor = open_out_of_the_way(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file = _identity(self._descriptor)
        self._write()

    def report_phase(self, phase: str) -> None:
        """Reports the phase, a phrase that continues a sentence after the task's name."""
        self._write(phase=phase, since=clock.now())

    def report_progress(self, progress: Progress) -> None:
        self._write(progress=progress)

    def report_injection(self, injection: str) -> None:
        self._write(injected=[*self._status.injected, injection])

    def report_strategy(self, name: str) -> None:
        self._write(strategy=name)

    def report_preemption_handler(self) -> None:
        self._write(saves_when_preempted=True)

    def report_own_tf_config(self, line: str, kept: bool) -> None:
        self._write(own_tf_config=line, own_tf_config_kept=kept)

    def report_own_resolver(self, resolver: str) -> None:
        self._write(own_resolver=resolver)

    def report_keras(self, patch: KerasPatch) -> None:
        self._write(keras=patch)

    def report_model(self, digest: ModelDigest) -> None:
        self._write(model=digest)

    def _write(self, **changes: Any) -> None:
        if os.getpid() != self._process:  # a child that the program has forked
            return
        with self._writing:
            self._status = replace(self._status, **changes)
            parts = {name: getattr(self._status, name) for name in ("progress", "keras", "model")}
            written = {name: part and asdict(part) for name, part in parts.items()}
            text = json.dumps({**vars(self._status), **written})
            self._length = max(self._length, len(text))
            # The descriptor may belong to another file by now: some programs close all descriptors they did not open.
            if self._descriptor is not None and _identity(self._descriptor) == self._file:
                with contextlib.suppress(OSError):  # such as a full disk, which must not fail the program
                    os.pwrite(self._descriptor, text.ljust(self._length).encode(), 0)


def report_phases(status: StatusFile, library: str = TENSORFLOW) -> None:
    """Reports the beginning and the end of the import of TensorFlow or JAX."""
    name = LIBRARIES[library]
    after_import(
        library,
        lambda _: status.report_phase(f"has imported {name}"),
        before=lambda: status.report_phase(f"is importing {name}"),
    )


def dump_on_signal(file: str) -> None:
    """Makes SIGURG append the stacks of all threads to the file, even while they are blocked in C++."""
    descriptor = open_out_of_the_way(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if descriptor is not None:
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def open_out_of_the_way(file: str, flags: int) -> Optional[int]:
    """Opens a file with a high descriptor, away from the program's own; None if that fails."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, or a low limit on descriptors
        descriptor = os.open(file, flags | os.O_CLOEXEC, 0o600)
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY)
        finally:
            os.close(descriptor)
    return None


def _identity(descriptor: Optional[int]) -> Optional[tuple[int, int]]:
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
