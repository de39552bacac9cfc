"""`--chaos`: faults injected on purpose, to test whether a program resumes where it stopped."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.gang.events import TaskExited, TaskReported
from launcher.gang.state import AttemptState
from launcher.tasks import TaskId, parse_task_id
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Injection

if TYPE_CHECKING:  # `status` needs none of the spec's models
    from launcher.spec.models import ClusterSpec

DONE = {
    "kill": "was killed",
    "stop": "was stopped by SIGSTOP",
    "exit": "was made to exit",
    "preempt": "was preempted",
    "full-disk": "found no space for a checkpoint",
}
_FAULT = re.compile(r"(?P<what>[\w-]+):(?P<task>\w+:\d+)@(?P<at>\w+)=(?P<value>\d+(?:\.\d+)?)")
_MOMENTS = ("epoch", "step", "save", "seconds")
_EXAMPLE = "write it like kill:worker:1@epoch=3"


@dataclass(frozen=True)
class Fault:
    """A fault to inject once, into one task."""

    task: TaskId
    injection: Injection

    def __str__(self) -> str:
        return f"{self.injection.what}:{self.task}@{self.injection.at}={self.injection.value:g}"


def parse_fault(text: str, spec: ClusterSpec) -> Fault:
    """`kill:worker:1@epoch=3` → Fault.

    Raises:
        UsageError: the text is not a fault, or the fault is impossible in this cluster.
    """
    found = _FAULT.fullmatch(text)
    if found is None:
        raise UsageError(f"--chaos {text!r} is not a fault", hint=_EXAMPLE)
    what, at = found["what"], found["at"]
    if what not in DONE:
        raise UsageError(f"--chaos cannot {what!r} a task", hint=f"use one of {', '.join(DONE)}")
    if at not in _MOMENTS:
        raise UsageError(f"--chaos does not know the moment {at!r}", hint=f"use one of {', '.join(_MOMENTS)}")
    try:
        task = parse_task_id(found["task"])
    except ValueError as error:
        raise UsageError(f"--chaos: {error}") from None
    tasks = [placed for _, placed in spec.placements()]
    if task not in tasks:
        raise UsageError(f"--chaos: this cluster has no {task}", hint=f"it has {', '.join(map(str, tasks[:8]))}")
    if spec.program.command is not None:
        raise UsageError(
            "--chaos needs a Python program, which distlaunch runs itself", hint="name the script, not a command"
        )
    if what == "full-disk" and at != "save":
        raise UsageError(
            f"--chaos fills the disk at a save, not at {at}=", hint="write it like full-disk:worker:0@save=2"
        )
    if at in ("epoch", "step") and not spec.progress:
        raise UsageError(f"--chaos counts {at}s, which needs `progress: true`", hint="use seconds=")
    return Fault(task, Injection(what, at, float(found["value"])))


def pending(faults: Iterable[Fault], states: Collection[AttemptState]) -> list[Fault]:
    """The faults that were injected in none of these attempts."""
    return [fault for fault in faults if not any(was_done(fault, state) for state in states)]


def needed(faults: Collection[Fault], states: Mapping[int, AttemptState]) -> dict[int, AttemptState]:
    """The attempts, by number, that suffice for the report on the faults."""
    if not faults or not states:
        return {}
    done = {number for number, state in states.items() if any(was_done(fault, state) for fault in faults)}
    trained = [number for number, state in states.items() if find_beginning(state) is not None]
    after = {min((later for later in trained if later > number), default=number) for number in done}
    return {number: states[number] for number in sorted({min(states), max(states), *done, *after})}


def injections_of(task: TaskId, faults: Iterable[Fault]) -> list[Injection]:
    return [fault.injection for fault in faults if fault.task == task]


def was_done(fault: Fault, state: AttemptState) -> bool:
    statuses = [find_status_before_restart(state, fault), state.status.get(fault.task)]
    return any(str(fault.injection) in status.injected for status in statuses if status is not None)


def find_injected(state: AttemptState, event: TaskExited) -> str:
    """The kind of the injected fault that has ended the task; empty if none has."""
    fault = find_last_injected(state, event.task)
    what = fault.partition(":")[0]
    ends = {"kill": event.exit.signal == signal.SIGKILL, "exit": event.exit.code == 1 and event.crash is None}
    return what if ends.get(what, what == "preempt" and not event.exit.ok) else ""


def find_last_injected(state: AttemptState, task: TaskId) -> str:
    """The last fault that was injected into the task, as `--chaos` takes it; empty if none was."""
    injected = state.status[task].injected if task in state.status else ()
    return f"{injected[-1].replace('@', f':{task}@', 1)}" if injected else ""


def render_injection(state: AttemptState, task: TaskId) -> str:
    """`, as --chaos kill:worker:1@step=5 asked for`; empty if no fault was injected into the task."""
    fault = find_last_injected(state, task)
    return f", as --chaos {fault} asked for" if fault else ""


def find_status_before_restart(state: AttemptState, fault: Fault) -> TaskReported | None:
    """The last status of the task before its first individual restart."""
    ends = [end.status for end in state.restarted.get(fault.task, ()) if end.status is not None]
    return ends[0] if ends else None


def find_beginning(state: AttemptState) -> tuple[int, int] | None:
    """The epoch and step that an attempt began with; None if it did no step."""
    begun = [
        (progress.first_epoch or 0, progress.first_step)
        for progress in state.progresses
        if progress.first_step is not None
    ]
    return min(begun, default=None)


def render_place(state: AttemptState, task: TaskId) -> str:
    progress = state.status[task].progress if task in state.status else None
    if progress is None or progress.first_step is None:
        return "no step"
    step = f"step {progress.step:,}"
    return step if progress.epoch is None else f"epoch {progress.epoch}, {step}"
