"""Which process of a run gets which signal in which phase, the expected outcome, and the code that tries one case."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from tests.harness.hosts import loopback
from tests.harness.hosts.sshd import QUIET, make_addresses, make_hosts, running_sshd
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, marked, wait_until

Who = Literal["guardian", "agent", "forkserver", "task", "controller", "reattachment"]
Phase = Literal["before start", "forming", "training", "stopping"]
Where = Literal["local", "ssh"]

SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
LEASE_S = 4.0
GRACE_S = 3.0
"""From TERM to KILL when the test stops the run: the length of the phase "stopping"."""
START_S = 12.0
"""The start timeout of runs that must end because they do not start."""
END_S = 45.0
"""How long a run may take to end after its fault, on a busy machine; the result has the time it took."""
TENSORFLOW = """
import os, pathlib, time
folder = pathlib.Path({folder!r})
(folder / f"importing-{{os.getpid()}}").touch()
while not (folder / "import").exists():
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Cell:
    """One fault."""

    where: Where
    who: Who
    signum: signal.Signals
    phase: Phase

    def __str__(self) -> str:
        return f"{self.where}, {self.who}, {self.signum.name}, {self.phase}"

    @property
    def expected(self) -> tuple[int, str | None]:
        """The exit status of distlaunch, and the class of the failure."""
        stops = self.signum == signal.SIGSTOP
        if self.who == "controller" and self.signum == signal.SIGKILL:
            return -signal.SIGKILL, None
        if self.phase == "stopping" or (self.who == "controller" and not stops):
            return 128 + signal.SIGTERM, None
        match self.who:
            case "task" if stops:
                return 3, "stalled" if self.phase == "training" else "start-timeout"
            case "task":
                return 1, "task-killed" if self.signum == signal.SIGKILL else "preempted"
            case "forkserver" if stops and self.phase == "before start":
                return 3, "start-timeout"
            case "forkserver" | "reattachment":
                return 0, None
            case "guardian" if stops:  # it is not needed before the end
                return 0, None
        return 3, "node-lost"

    @property
    def goes_on(self) -> bool:
        """Whether the run continues as if nothing had happened."""
        return self.expected[0] == 0


@dataclass(frozen=True)
class Played:
    """The outcome: seconds from the fault to the end of the run, and to the end of its last process."""

    ended_s: float
    empty_s: float


def all_cells() -> list[Cell]:
    """Every possible combination."""
    cells = itertools.product(get_args(Where), get_args(Who), SIGNALS, get_args(Phase))
    return [Cell(*cell) for cell in cells if _can_be(Cell(*cell))]


def _can_be(cell: Cell) -> bool:
    if cell.who == "reattachment":  # comes when a connection has broken
        return cell.where == "ssh" and cell.phase in ("forming", "training")
    return (cell.who, cell.phase) != ("task", "before start")


def play(cell: Cell, folder: Path, number: int = 0) -> Played:
    """Injects the fault into a run of two trivial workers; fails if the outcome is not the expected one.

    Args:
        cell: the fault.
        folder: an empty one.
        number: below 100, and different for each fault played at the same time, so that each has its own hosts.
    """
    with contextlib.ExitStack() as stack:
        run = _Run(cell, folder, number, stack)
        try:
            run.reach()
            return run.hit()
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}; it said: {run.said}") from error
        finally:
            run.clear()


class _Run:
    """A `distlaunch up` of `programs/phases.py` in the background."""

    def __init__(self, cell: Cell, folder: Path, number: int, stack: contextlib.ExitStack) -> None:
        self._cell = cell
        self._folder = folder
        self._mark = make_mark()
        (folder / "tensorflow.py").write_text(TENSORFLOW.format(folder=str(folder)))
        env = dict(self._mark)
        if cell.where == "ssh":
            hosts = make_hosts(folder, make_addresses(100 + number))
            hosts.trust()
            for address in hosts.addresses.values():
                stack.enter_context(running_sshd(hosts, address, options=QUIET, env=self._mark))
            env |= hosts.env
            nodes = "".join(f"  - {{host: {name}, python: {sys.executable}}}\n" for name in hosts.addresses)
        else:
            nodes = "  - {host: local, tasks: {worker: 2}}\n"
        (folder / "spec.yaml").write_text(f"nodes:\n{nodes}{self._make_rest()}")
        self._stderr = stack.enter_context((folder / "stderr").open("wb"))
        self._process = subprocess.Popen(
            distlaunch_command("up", "--run-dir", str(folder / "run"), str(folder / "spec.yaml")),
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
        )

    def _make_rest(self) -> str:
        failure = self._cell.expected[1]
        # A stopped reattachment uses up a third of the lease.
        lease_s = 4 * LEASE_S if self._cell.who == "reattachment" else LEASE_S
        start_s = START_S if failure == "start-timeout" else 120
        stall = f", stall_s: {LEASE_S}" if failure == "stalled" else ""
        ports = loopback.ports()
        return (
            f"program: {{script: {PROGRAMS / 'phases.py'}, args: [{self._folder}]}}\n"
            f"env: {{PYTHONPATH: {self._folder}}}\nenv_from: [{next(iter(self._mark))}]\n"
            # A spec with restarts keeps the forkserver; no failure here is `port-taken`, so none is restarted.
            "restart: {max_restarts: 1, on: [port-taken]}\n"
            f"timeouts: {{lease_s: {lease_s}, stop_grace_s: {GRACE_S}, start_s: {start_s}{stall}}}\n"
            f"ports: {ports[0]}-{ports[-1]}\n"
        )

    @property
    def said(self) -> str:
        return (self._folder / "stderr").read_text()

    def _touch(self, *names: str) -> None:
        for name in names:
            (self._folder / name).touch()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or self._process.poll() is not None, what)
        assert self._process.poll() is None, f"the run has ended before: {what}"

    def reach(self) -> None:
        """Lets the run proceed to the phase of the fault."""
        nodes = 2 if self._cell.where == "ssh" else 1
        self._wait(lambda: len([*self._folder.glob("importing-*")]) == nodes, "the forkservers import")
        if self._cell.phase == "before start":
            return
        self._touch("import")
        self._wait(lambda: len(self._task_pids()) == 2, "the tasks run")
        if self._cell.phase == "forming":
            return
        self._touch("form")
        self._wait(lambda: "The cluster is up" in self.said, "the cluster is up")
        if self._cell.phase == "stopping":
            self._touch("stopping")
            self._process.terminate()
            self._wait(lambda: "stopping all tasks" in self.said, "the run stops")

    def hit(self) -> Played:
        """Sends the signal, and checks the outcome."""
        cell = self._cell
        if cell.who == "reattachment":
            for session in self._sessions():
                session.kill()
        victim = eventually(self._find)
        with contextlib.suppress(psutil.NoSuchProcess):  # a reattachment that is no longer needed
            victim.send_signal(cell.signum)
        hit = time.monotonic()
        if cell.goes_on:
            self._touch("import", "form")
            self._wait(lambda: "The cluster is up" in self.said, "the cluster is up")
            if cell.who == "reattachment":
                self._wait(lambda: self.said.count("reconnected after") >= 2, "it has connected again")
            self._touch("end")
            with contextlib.suppress(psutil.NoSuchProcess):
                if cell.who == "reattachment":  # if it was stopped before it called, no process knows of it
                    victim.resume()
        elif cell.who == "controller" and cell.signum == signal.SIGSTOP:
            wait_until(lambda: self._others() == [], "without its controller, no process is left", END_S)
            victim.resume()
        status = self._process.wait(END_S)
        ended = time.monotonic()
        await_none_left(self._mark, END_S)
        empty = time.monotonic()
        self._check(status)
        return Played(ended - hit, empty - hit)

    def _check(self, status: int) -> None:
        expected, failure = self._cell.expected
        assert status == expected, f"it ended with {status}, and not with {expected}"
        if expected == -signal.SIGKILL:
            return
        report = json.loads((self._folder / "run" / "report.json").read_text())
        assert report["exit_status"] == status
        verdict = report["attempts"][-1]["verdict"]
        assert failure in (None, verdict["reference"]), verdict
        assert "Traceback" not in self.said
        errors = self._folder / "run" / "agent.stderr"
        assert not errors.exists() or "Traceback" not in errors.read_text(), errors.read_text()

    def clear(self) -> None:
        for process in marked(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()

    # --- the processes of each role ---

    def _task_pids(self) -> list[int]:
        """The process ids of worker:0 and worker:1, as far as their logs have them."""
        pids = []
        for number in range(2):
            log = self._folder / "run" / "attempt-1" / f"worker-{number}.log"
            words = log.read_text().split() if log.exists() else []
            pids += [int(words[1])] if len(words) > 1 else []
        return pids

    def _others(self) -> list[psutil.Process]:
        return [process for process in marked(self._mark) if process.pid != self._process.pid]

    def _find(self) -> psutil.Process:
        """The process to hit: the last of its role."""
        if self._cell.who == "controller":
            return psutil.Process(self._process.pid)
        if self._cell.who == "task":
            return psutil.Process(self._task_pids()[-1])
        found = [process for process, role in self._roles() if role == self._cell.who]
        assert found, f"there is no {self._cell.who}"
        return found[-1]

    def _roles(self) -> Iterator[tuple[psutil.Process, Who]]:
        for process in self._others():
            with contextlib.suppress(psutil.NoSuchProcess):
                verb, above = _verb(process), process.parent()
                if verb == "attach":
                    yield process, "reattachment"
                elif verb in ("agent", "node") and above is not None:
                    is_agent = _verb(above) == verb
                    if not is_agent or any(_verb(child) == "forkserver" for child in process.children()):
                        yield process, "agent" if is_agent else "guardian"
                elif verb == "forkserver" and (self._folder / f"importing-{process.pid}").exists():
                    yield process, "forkserver"

    def _sessions(self) -> list[psutil.Process]:
        """The connections of this run's nodes, without those of runs played at the same time."""
        guardians = [process for process, role in self._roles() if role == "guardian"]
        above = [guardian.parent() for guardian in guardians]
        return [process for process in above if process is not None and process.name() == "sshd"]


def _verb(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[-1] if words and "python" in words[0] else ""
