"""The launchers, and what counts as the verdict of each.

distlaunch   the verdict in report.json: the task that it names, its message, and the evidence about this task. In a run
             that has succeeded, the task is the one whose interpreter did not end well. Said: the line `Error:`, or
             `Succeeded`.
torchrun     the block `Root Cause (first observed failure)`: its rank and all that follows. The program has `@record`,
             as PyTorch's documentation advises, so the block has the exception and its traceback. Said: the block's
             first line. It runs the loop of the same shape with PyTorch and gloo, because it sets no TF_CONFIG.
Ray Train    the first rank that its error names, Ray's text about it, and the traceback in the output of this worker.
             The program is the training function. Said: when `fit` raises the error.
by hand      TF_CONFIG in three shells: the process that ends first, how it ended, and the last traceback in its
             output; see `by_hand`. Said: when it ends.

Reading is generous to rivals: any line of a traceback counts as named. A rival has no classes: an exception or an exit
status counts as `task-failed`, a signal, or a process that is gone, as `task-killed`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from tests.benchmarks.verdicts.faults import SUCCEEDED, WORKERS, Fault
from tests.benchmarks.verdicts.score import Answer
from tests.harness.places import ROOT
from tests.harness.processes.commands import distlaunch_command

LIMITS = {"start_s": 30, "stall_s": 10, "drain_s": 10}
"""distlaunch's time limits for a program that trains for seconds."""
OURS = MappingProxyType({"PYTHONPATH": str(ROOT)})
"""The variables of commands that find this project."""


class Line(NamedTuple):
    """A line of a launcher's output."""

    time: float
    text: str


class Ran(NamedTuple):
    """A launcher that has been run: its output, the folder of its files, its status, None if it had to be killed."""

    lines: Sequence[Line]
    folder: Path
    status: int | None


class Said(NamedTuple):
    """An answer, and when it was said, in Unix seconds."""

    answer: Answer
    time: float


class Tool(ABC):
    """A launcher.

    Attributes:
        name: its name in commands.
        title: its name in documents.
        env: variables that it runs with.
        python_variable: the variable that names the Python in which it is installed; empty: the one that runs this.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    env: ClassVar[Mapping[str, str]] = MappingProxyType({})
    python_variable: ClassVar[str] = ""

    def is_installed(self) -> bool:
        return not self.python_variable or self.python_variable in os.environ

    def can_play(self, fault: Fault) -> bool:
        return True

    @abstractmethod
    def make_command(self, fault: Fault, moment: Path, folder: Path) -> list[str]: ...

    @abstractmethod
    def read(self, ran: Ran) -> Said | None:
        """The verdict, from the launcher's output and its files; None if there is none."""


def _index(task: str | None) -> int | None:
    return int(task.rpartition(":")[2]) if task is not None else None


class Distlaunch(Tool):
    """Ours, with limits for a short program."""

    name = "distlaunch"
    title = "distlaunch"
    env = OURS

    def make_command(self, fault: Fault, moment: Path, folder: Path) -> list[str]:
        limits = [word for name, value in LIMITS.items() for word in ("--set", f"timeouts.{name}={value}")]
        argv = fault.make_argv(fault.program, moment)
        return distlaunch_command("local", "-n", str(WORKERS), *limits, "--run-dir", str(folder / "run"), *argv)

    def read(self, ran: Ran) -> Said | None:
        said = next((line.time for line in ran.lines if line.text.startswith(("Error: ", "Succeeded "))), None)
        report = ran.folder / "run" / "report.json"
        if said is None or not report.exists():
            return None
        verdict = json.loads(report.read_text())["attempts"][0]["verdict"]
        worker = _index(verdict["task"])
        if verdict["reference"] == SUCCEEDED:
            late = [line for line in verdict["evidence"] if " finished its program before its interpreter " in line]
            worker = _index(late[0].partition(" ")[0]) if len(late) == 1 else None
        others = tuple(f"worker:{index}" for index in range(WORKERS) if index != worker)
        evidence = [line for line in verdict["evidence"] if not line.startswith(others)]
        return Said(Answer(verdict["reference"], worker, "\n".join([verdict["message"], *evidence])), said)


class Torchrun(Tool):
    """PyTorch's launcher."""

    name = "torchrun"
    title = "torchrun"
    python_variable = "DISTLAUNCH_TORCH_PYTHON"

    def can_play(self, fault: Fault) -> bool:
        return fault.in_torch

    def make_command(self, fault: Fault, moment: Path, folder: Path) -> list[str]:
        launcher = [os.environ[self.python_variable], "-m", "torch.distributed.run", "--standalone"]
        # PyTorch 1.13 cannot read its own default, 0, on Python 3.11; this redirects the output of a tenth worker only.
        launcher += ["--redirects", "9:3", "--tee", "9:3"]
        return [*launcher, "--nproc_per_node", str(WORKERS), *fault.make_argv("broken_torch", moment)]

    def read(self, ran: Ran) -> Said | None:
        if ran.status == 0:
            return Said(Answer(SUCCEEDED), ran.lines[-1].time)
        start = next((n for n, line in enumerate(ran.lines) if line.text.startswith("Root Cause (first")), None)
        if start is None:
            return None
        text = "\n".join(line.text for line in ran.lines[start:])
        rank, exitcode = (re.search(rf"^ *{name} *: (-?\d+)", text, re.MULTILINE) for name in ("rank", "exitcode"))
        if rank is None or exitcode is None:
            return None
        return Said(make_rival_answer(int(rank[1]), int(exitcode[1]), text), ran.lines[start].time)


class RayTrain(Tool):
    """Ray Train's trainer for TensorFlow."""

    name = "ray"
    title = "Ray Train"
    env = MappingProxyType({"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    python_variable = "DISTLAUNCH_RAY_PYTHON"

    def make_command(self, fault: Fault, moment: Path, folder: Path) -> list[str]:
        starter = Path(__file__).with_name("with_ray.py")
        return [os.environ[self.python_variable], str(starter), str(WORKERS), *fault.make_argv(fault.program, moment)]

    def read(self, ran: Ran) -> Said | None:
        line = next((line for line in ran.lines if line.text.startswith('{"failed": ')), None)
        if line is None:
            return None
        end = json.loads(line.text)
        if end["failed"] is None:
            return Said(Answer("task-failed"), line.time)
        if not end["failed"]:
            return Said(Answer(SUCCEEDED), line.time)
        rank, said = next(iter(end["failed"].items()))
        worker = int(rank)
        reference = "task-killed" if worker in end["gone"] else "task-failed"
        return Said(Answer(reference, worker, f"{said}\n{_read_traceback(ran.lines, worker)}"), line.time)


def _read_traceback(lines: Sequence[Line], rank: int) -> str:
    """What the worker of this rank has printed, from Ray's note of an error on."""
    texts = [line.text for line in lines]
    prefix = next((text.partition(") ")[0] for text in texts if text.endswith(f" rank {rank} trains")), None)
    printed = [text for text in texts if prefix is not None and text.startswith(prefix)]
    start = next((n for n, text in enumerate(printed) if "Error in training function" in text), len(printed))
    return "\n".join(printed[start:])


class ByHand(Tool):
    """Three shells, each with its TF_CONFIG."""

    name = "by-hand"
    title = "`TF_CONFIG` by hand"
    env = OURS

    def make_command(self, fault: Fault, moment: Path, folder: Path) -> list[str]:
        return [sys.executable, "-m", "tests.benchmarks.verdicts.by_hand", *fault.make_argv(fault.program, moment)]

    def read(self, ran: Ran) -> Said | None:
        for line in ran.lines:
            ended = re.fullmatch(r"worker:(\d+) ended first with (-?\d+)", line.text)
            if ended is not None:
                text = "\n".join(each.text for each in ran.lines)
                return Said(make_rival_answer(int(ended[1]), int(ended[2]), text), line.time)
            if line.text == "all ended with 0":
                return Said(Answer(SUCCEEDED), line.time)
        return None


def make_rival_answer(worker: int, status: int, text: str) -> Answer:
    """The answer of a launcher that has no classes; `status`: the exit status, or the signal as a negative number."""
    if status < 0:
        return Answer("task-killed", worker, text)
    return Answer("task-failed", worker, f"{text}\nstatus {status}")


TOOLS: tuple[Tool, ...] = (Distlaunch(), Torchrun(), RayTrain(), ByHand())
