"""Runs one fault under one launcher, and notes when the launcher speaks and when its processes are gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.benchmarks.verdicts.faults import Fault
from tests.benchmarks.verdicts.score import Played
from tests.benchmarks.verdicts.tools import Line, Ran, Tool
from tests.harness.witness import make_mark, marked

LIMIT_S = 40.0
"""How long after the fault a launcher may take to say something; later, it has not said it."""
START_S = 120.0
"""How long the fault itself, or a run without one, may take."""
AFTER_S = 5.0
"""How long processes may live after their launcher."""
POLL_S = 0.1


@dataclass
class _Output:
    """The lines of a process, with the time at which each came."""

    process: subprocess.Popen[bytes]
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(Line(time.time(), line.decode(errors="replace").rstrip()))

    def finish(self) -> list[Line]:
        self._thread.join()
        return self.lines


def play(tool: Tool, fault: Fault, keep: Path | None = None) -> Played:
    """Plays the fault; `keep`: an existing folder that gets the launcher's files and its output."""
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        moment_file = folder / "moment"
        mark = make_mark()
        process = subprocess.Popen(
            tool.make_command(fault, moment_file, folder),
            cwd=folder,
            env={**os.environ, **tool.env, **mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        output = _Output(process)
        began = time.time()
        try:
            gone = _watch(process, mark, moment_file if fault.is_one else folder / "never", began)
            left = [each for each in marked(mark) if each.pid != process.pid]
            status = process.poll()
        finally:
            _kill_all(mark)
            process.wait()
        lines = output.finish()
        if keep is not None:
            (folder / "output").write_text("".join(f"{line.time - began:6.2f} {line.text}\n" for line in lines))
        moment = _read_moment(moment_file) or began
        answer = tool.read(Ran(lines, folder, status))
    return Played(
        fault,
        answer.answer if answer is not None else None,
        answer.time - moment if answer is not None else None,
        gone - moment if gone is not None else None,
        len(left),
    )


def _watch(process: subprocess.Popen[bytes], mark: dict[str, str], moment: Path, began: float) -> float | None:
    """When the launcher and all its processes were gone; None if some are not at the end of their time."""
    ended: float | None = None
    while True:
        now = time.time()
        fault = _read_moment(moment)
        if ended is None and process.poll() is not None:
            ended = now
        if ended is not None:
            if not marked(mark):
                return now
            if now > ended + AFTER_S:
                return None
        elif now > (began + START_S if fault is None else fault + LIMIT_S):
            return None
        time.sleep(POLL_S)


def _read_moment(file: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # not written yet, or not as a whole
        return float(file.read_text())
    return None


def _kill_all(mark: dict[str, str]) -> None:
    while left := marked(mark):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_S)
