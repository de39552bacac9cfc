"""The controller process of a run that a Python program has started; it writes to none of the user's streams."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import IO

from launcher.console.writer import Console
from launcher.controller.launch import conduct, new_start
from launcher.errors import DistlaunchError, ShownError, as_ours
from launcher.gang.faults import parse_fault
from launcher.plan.planner import Planner
from launcher.python.exchange import Began, Ended, News, NotStarted, Order, parse, send
from launcher.rundir.directory import RunDir
from launcher.rundir.names import choose_folder
from launcher.signals import Interrupts
from launcher.sources.node_list import with_nodes
from worker_entry.system import clock

PARENT_S = 1.0
"""How often to look for the parent process: after its end, its children may keep the pipe open."""


def main() -> None:
    """Reads an order from stdin, and writes messages about the run to stdout."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent ignores it, the exit status of our children is lost
    order: Order = parse(sys.stdin.buffer.readline())
    channel = os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)  # the output of libraries must not mix with messages
    os.close(devnull)
    threading.Thread(target=_stop_without, args=(order.parent,), name="parent", daemon=True).start()
    send(channel, _run(order, channel))


def _run(order: Order, channel: IO[bytes]) -> News:
    files: list[RunDir] = []

    def open_folder() -> RunDir:
        files.append(RunDir.create(choose_folder(Path(order.run_dir) if order.run_dir else None, start.run_id)))
        return files[0]

    def announce(_planner: Planner, console: Console, _interrupts: Interrupts) -> None:
        console.leave()  # the journal has the messages, and the logs are in files
        send(channel, Began(str(files[0].root)))

    try:
        clock.share()
        spec = with_nodes(order.read_spec())
        faults = [parse_fault(text, spec) for text in order.chaos]
        start = new_start(spec, checks=order.checks)
        report = conduct(spec, start, open_folder, verbose=False, faults=faults, prepare=announce)
        return Ended(report.model_dump_json())
    except ShownError as error:
        try:
            return Ended(files[0].report.read_text(encoding="utf-8"))
        except OSError:
            return NotStarted.of(error)
    except Exception as error:
        ours = as_ours(error)
        if not isinstance(ours, DistlaunchError):
            raise  # a bug; the parent reads the traceback from stderr
        return NotStarted.of(ours)


def _stop_without(parent: int) -> None:
    """Stops the run when the parent process closes our stdin, or is gone."""
    while os.getppid() == parent:
        if select.select([0], [], [], PARENT_S)[0]:
            break
    os.kill(os.getpid(), signal.SIGTERM)
