"""The table of faults, each with its truth: which worker, which class, which words, which line, does a restart help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.harness.places import PROGRAMS

WORKERS = 3
EARLY, LATE = 0, 25
"""The step of the fault: the first, and one after more than 20."""
SUCCEEDED = "succeeded"

_LOOP, _KERAS, _TORCH = "broken_loop", "broken_keras", "broken_torch"
_MARKER = re.compile(r"# fault: ([a-z-]+)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the truth about it.

    Attributes:
        name: the function of `programs/broken.py`, or the name by which a program asks for it.
        place: where in the program it happens.
        worker: the index of the worker that has it.
        step: the step at which it happens.
        classes: the right classes; the others, if there are some, are right as well. At the exit of a program that has
            done its training, success is right if the launcher names the worker.
        words: what a right cause contains.
        has_line: whether a right cause also has the line with the fault's marker.
        restart_helps: whether the cluster may succeed if it is started again without a change.
        program: the program with TensorFlow.
        in_torch: whether the fault exists without TensorFlow.
    """

    name: str
    place: str
    worker: int
    step: int
    classes: tuple[str, ...] = ("task-failed",)
    words: str = ""
    has_line: bool = True
    restart_helps: bool = False
    program: str = _LOOP
    in_torch: bool = True

    def __str__(self) -> str:
        when = {"step": "", "data": ", in the data", "layer": ", in a layer"}.get(self.place, f", at {self.place}")
        return f"{self.name}{when}, worker:{self.worker}, step {self.step}"

    @property
    def is_one(self) -> bool:
        """Whether anything is wrong at all."""
        return self.classes != (SUCCEEDED,)

    def make_argv(self, program: str, moment: Path) -> list[str]:
        """The program's command line, without the interpreter; `moment`: the file that gets the time of the fault."""
        path = PROGRAMS / f"{program}.py"
        return [str(path), self.name, self.place, str(self.worker), str(self.step), str(moment)]

    def find_lines(self) -> tuple[tuple[str, int], ...]:
        """The file and line of each marker; a fault may have one in each program."""
        return find_markers().get(self.name, ())


@cache
def find_markers() -> dict[str, tuple[tuple[str, int], ...]]:
    """The file's name and the line of each marker of the programs, by fault."""
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for path in sorted(PROGRAMS.glob("broken*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in _MARKER.findall(line):
                found[name] = (*found.get(name, ()), (path.name, number))
    return found


def _error(name: str, place: str, worker: int, step: int, words: str, **more: object) -> Fault:
    return Fault(name=name, place=place, worker=worker, step=step, words=words, **more)  # type: ignore[arg-type]  # passed on


def _end(name: str, worker: int, step: int, words: str, **more: object) -> Fault:
    """A process that ends, or seems to hang, without an exception."""
    place = more.pop("place", "step")
    return Fault(name=name, place=place, worker=worker, step=step, words=words, has_line=False, **more)  # type: ignore[arg-type]  # passed on


def _hang(name: str, place: str, worker: int, step: int, **more: object) -> Fault:
    more = {"classes": ("stalled",), "restart_helps": True, **more}
    return Fault(name=name, place=place, worker=worker, step=step, **more)  # type: ignore[arg-type]  # passed on


def _apart(name: str, place: str, worker: int, step: int, **more: object) -> Fault:
    """Workers that are out of step; what the worker calls is the cause, if it calls anything."""
    more = {"classes": ("out-of-step", "ended-early"), **more}
    return Fault(name=name, place=place, worker=worker, step=step, **more)  # type: ignore[arg-type]  # passed on


def _fine(name: str, place: str, worker: int, step: int) -> Fault:
    return Fault(name=name, place=place, worker=worker, step=step, classes=(SUCCEEDED,), has_line=False)


_OOM, _KILLED, _VERSION, _DISK = ("out-of-memory",), ("task-killed",), ("version-mismatch",), ("disk-full",)

FAULTS: tuple[Fault, ...] = (
    # exceptions in the data, in the model, in a step
    _error("key-error", "data", 0, EARLY, "KeyError: 'no label for image 4711'"),
    _error("key-error", "data", 2, LATE, "KeyError: 'no label for image 4711'"),
    _error("json-error", "data", 1, LATE, "JSONDecodeError"),
    _error("missing-file", "data", 2, EARLY, "FileNotFoundError"),
    _error("shape-error", "train-step", 0, LATE, "ValueError: cannot reshape array"),
    _error("key-error", "train-step", 1, EARLY, "KeyError", program=_KERAS),
    _error("several-lines", "layer-trace", 2, EARLY, "the batch has 2 errors", program=_KERAS),
    _error("layer-shape", "layer-trace", 0, EARLY, "", program=_KERAS),
    _error("key-error", "layer", 1, LATE, "KeyError", program=_KERAS),
    _error("key-error", "step", 0, LATE, "KeyError", program=_KERAS),
    _error("chained", "step", 1, LATE, "RuntimeError: batch 25 cannot be used"),
    _error("assertion", "step", 2, LATE, "AssertionError"),
    _error("nan-loss", "step", 1, LATE, "FloatingPointError: the loss is nan"),
    _error("recursion", "step", 2, EARLY, "RecursionError"),
    _error("several-lines", "step", 0, LATE, "ValueError: the batch has 2 errors:"),
    _error("interrupt", "step", 2, LATE, "KeyboardInterrupt"),
    # errors that look like those of a peer that is gone
    _error("connection-reset", "data", 2, LATE, "ConnectionResetError", restart_helps=True),
    _error("storage-unavailable", "step", 1, LATE, "UnavailableError: bucket images", restart_helps=True),
    _error("wrapped-key-error", "train-step", 1, LATE, "KeyError: 'no label for image 4712'"),
    _end("wrapped-os-exit", 2, LATE, "status 5"),
    # threads, children, exit handlers
    _error("thread-then-exit", "step", 0, LATE, "OSError: image 4711 is cut off"),
    _error("thread-then-wait", "step", 1, LATE, "OSError: image 4712 is cut off", classes=("stalled", "task-failed")),
    _error("child-error", "step", 2, LATE, "CalledProcessError"),
    _error("child-killed", "data", 1, EARLY, "SIGKILL", restart_helps=True),
    _error("error-and-handler-error", "step", 0, LATE, "KeyError: 'no label for image 4713'"),
    _error("error-and-handler-exit", "step", 1, LATE, "KeyError: 'no label for image 4714'"),
    _end("handler-exit", 2, EARLY, "status 4", place="ready", classes=("task-failed", SUCCEEDED)),
    # ends without an exception
    _end("os-exit", 1, LATE, "status 5"),
    _end("os-exit", 0, EARLY, "status 5", place="ready"),
    _error("exit-text", "step", 0, LATE, "the data ran out"),
    _error("exit-three", "step", 2, EARLY, "3"),
    _end("exit-zero", 2, LATE, "status 0", classes=("ended-early",)),
    _end("exit-zero", 1, EARLY, "status 0", classes=("ended-early", "drain-timeout"), place="ready"),
    _end("segfault", 1, LATE, "SIGSEGV", classes=_KILLED),
    _end("segfault", 0, EARLY, "SIGSEGV", classes=_KILLED, place="ready"),
    _end("abort", 2, LATE, "SIGABRT", classes=_KILLED),
    _end("bus-error", 1, LATE, "SIGBUS", classes=_KILLED),
    _end("kill", 2, LATE, "SIGKILL", classes=(*_KILLED, *_OOM), restart_helps=True),
    _end("kill", 0, EARLY, "SIGKILL", classes=(*_KILLED, *_OOM), restart_helps=True, place="start"),
    _end("term", 1, LATE, "SIGTERM", classes=("preempted",), restart_helps=True),
    _end("term-handled", 0, LATE, "status 143", classes=("preempted",), restart_helps=True),
    # hangs
    _hang("stop", "step", 1, LATE, words="SIGSTOP", has_line=False),
    _hang("stop", "step", 0, EARLY, words="SIGSTOP", has_line=False),
    _hang("hang", "data", 1, LATE),
    _hang("hang", "start", 2, EARLY, classes=("start-timeout",)),
    _hang("deadlock", "step", 2, LATE),
    _hang("hang-in-read", "data", 0, LATE),
    _hang("child-hangs", "step", 0, LATE),
    _hang("handler-hangs", "ready", 1, EARLY, classes=("drain-timeout", SUCCEEDED)),
    _hang("thread-stays", "end", 2, EARLY, classes=("drain-timeout", SUCCEEDED)),
    # workers out of step
    _apart("evaluate-alone", "step", 2, LATE, program=_KERAS),
    _apart("evaluate-alone", "train-step", 0, LATE),
    _apart("other-shape", "train-step", 1, LATE),
    _apart("skipped-step", "train-step", 1, LATE, has_line=False),
    _apart("fewer-batches", "data", 0, EARLY, has_line=False, program=_KERAS),
    _apart("fewer-batches", "data", 2, EARLY, has_line=False),
    _apart("more-batches", "data", 1, EARLY, has_line=False),
    _apart("other-model", "ready", 2, EARLY, has_line=False, program=_KERAS),
    # versions, ports, memory, disks, the network
    _error("missing-module", "start", 1, EARLY, "ModuleNotFoundError: No module named 'image_codec'"),
    _error("missing-symbol", "start", 2, EARLY, "undefined symbol: codec_of_another_version", classes=_VERSION),
    _error("old-name", "ready", 0, EARLY, "'asscalar'", classes=(*_VERSION, "task-failed")),
    _end("port-taken", 1, EARLY, "in use", classes=("port-taken",), restart_helps=True, place="start", in_torch=False),
    _error("metrics-port-taken", "step", 2, EARLY, "Address already in use"),
    _end("wrong-port", 2, EARLY, "", classes=("start-timeout", "task-failed"), place="cluster"),
    _error("bad-port", "cluster", 2, EARLY, "http"),
    _error("memory-error", "step", 1, LATE, "MemoryError", classes=_OOM),
    _error("array-too-big", "data", 2, LATE, "Unable to allocate", classes=_OOM),
    _error("full-disk", "step", 0, LATE, "No space left on device", classes=_DISK),
    _error("checkpoint-on-full-disk", "step", 1, LATE, "No space left on device", classes=_DISK),
    _error("file-too-big", "step", 2, LATE, "File too large"),
    _end("lost-link", 1, LATE, "", classes=("task-failed", "node-lost"), restart_helps=True),
    # nothing is wrong
    _fine("none", "step", 0, LATE),
    _fine("slow", "step", 1, EARLY),
    _fine("slow-start", "start", 2, EARLY),
    _fine("handled", "step", 0, EARLY),
)
