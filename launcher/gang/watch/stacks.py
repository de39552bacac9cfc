"""The current Python stacks of all tasks of a cluster, and which workers are out of step.

Equal stacks are grouped. Workers are out of step if, for example, one evaluates alone, and its collectives meet
different collectives of its peers.

TensorFlow notices when two collectives that meet differ, and reports it to one worker or to some. The place of each
worker is in its crash record, or in its stack, which it sends before it is stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from launcher.gang.events import TaskExited
from launcher.gang.state import AttemptState
from launcher.printable import printable
from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.collateral import OUT_OF_STEP
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import CHILD
from worker_entry.protocol.values import Activity, SourceLine

SHOWN_THREADS = 2
"""The most threads besides the main thread that a task's line names."""
ANSWER_S = 5.0
"""How long to wait for the tasks' answers."""
# Bounded: a broken node may send a line of a million digits, which int() refuses, or which takes hours to match.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]{1,32}.{0,300}\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}) in (.*)$', re.MULTILINE)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "__autograph_generated_file")
_WAITING = ("threading.py", "queue.py", "selectors.py", "socket.py", "ssl.py", "subprocess.py", "_base.py", "thread.py")
"""Modules of the standard library in which a thread waits for others."""
_OURS = re.compile(r"/worker_entry/(?!demo/)(?:\w+/)*\w+\.py$")  # the demo is a program like a user's
_WRAPPERS = ("error_handler",)
"""Functions in which Keras and TensorFlow wrap their public functions."""
Frame = tuple[str, int, str]
"""File, line and function."""
PHRASES = ("Collective instance ", "Shape mismatch in the collective instance", "is joining a group ")
"""Parts of TensorFlow's message about collectives that differ."""


@dataclass(frozen=True)
class Stack:
    """The stacks of a task: its main thread, innermost frame first, and the other threads that run program code."""

    main: tuple[Frame, ...] = ()
    others: tuple[tuple[Frame, ...], ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether the program's own code is running, and not a library, which may wait for others."""
        return bool(self.others) or (bool(self.main) and _own_frame(self.main) is self.main[0])

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the program's code in the main thread."""
        return _own_frame(self.main)


class StackCollector:
    """Collects the answers of the tasks, which were all asked at `now`, in monotonic seconds."""

    def __init__(self, tasks: Iterable[TaskId], now: float) -> None:
        self._missing = set(tasks)
        self._deadline = now + ANSWER_S
        self._texts: dict[TaskId, str] = {}
        self.activity: dict[TaskId, Activity] = {}

    def note(self, task: TaskId, text: str, activity: Activity) -> None:
        self._texts[task] = text
        self.activity[task] = activity
        self._missing.discard(task)

    def texts(self, now: float) -> dict[TaskId, str] | None:
        """The answers once all tasks have answered or time is up, empty for missing answers; None before that."""
        if self._missing and now < self._deadline:
            return None
        return {**dict.fromkeys(self._missing, ""), **self._texts}


def group_stacks(texts: Mapping[TaskId, str]) -> list[tuple[list[TaskId], Stack]]:
    """Groups of tasks with equal stacks, the largest group first.

    Args:
        texts: faulthandler's output for each task; empty if there is none.
    """
    groups: dict[Stack, list[TaskId]] = {}
    for task in sorted(texts):
        groups.setdefault(parse_stack(texts[task]), []).append(task)
    return [(tasks, stack) for stack, tasks in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))]


def find_call(text: str) -> SourceLine | None:
    """The program's current line in its main thread, and the public library function that it has called there."""
    frames = [frame for frame in parse_stack(text).main if frame[2] not in _WRAPPERS]
    own = _own_frame(frames)
    if own is None:
        return None
    number = frames.index(own)
    call = frames[number - 1][2] if number else ""
    return SourceLine(own[0], own[1], call if call.isidentifier() and not call.startswith("_") else None)


def render_places(texts: Mapping[TaskId, str]) -> list[str]:
    """A line for each group of tasks."""
    return [f"{name_tasks(tasks)} {_place(stack, len(tasks))}" for tasks, stack in group_stacks(texts)]


def render_stacks(texts: Mapping[TaskId, str]) -> str:
    """The lines of `render_places`, each with the stack below it."""
    lines = []
    for place, (_, stack) in zip(render_places(texts), group_stacks(texts), strict=True):
        lines += [place, *_render_frames(stack.main)]
        for frames in stack.others:
            lines += ["    and in another thread", *_render_frames(frames)]
    return "\n".join(lines)


def parse_stack(text: str) -> Stack:
    """The last stack that faulthandler wrote, without the frames of worker_entry."""
    first, *children = text.split(CHILD)
    threads = _parse_threads(first)
    if not threads:
        return Stack()
    # The newest thread is first, so the main thread is last.
    others = [*threads[:-1], *(frames for child in children for frames in _parse_threads(child))]
    return Stack(threads[-1], tuple(sorted(frames for frames in others if _own_frame(frames) is not None)))


def _parse_threads(text: str) -> list[tuple[Frame, ...]]:
    return [_parse_frames(part) for part in _THREAD.split(text)[1:]]


def _parse_frames(text: str) -> tuple[Frame, ...]:
    frames = [(printable(file), int(line), printable(name)) for file, line, name in _FRAME.findall(text)]
    while frames and (_OURS.search(frames[-1][0]) or frames[-1][0].startswith("<frozen")):
        frames.pop()
    return tuple(frames)


def _own_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program's own code."""
    theirs = (frame for frame in frames if not _OURS.search(frame[0]))
    return next((frame for frame in theirs if not any(part in frame[0] for part in _LIBRARIES)), None)


def working_frame(stack: Stack, *, waits: bool) -> Frame | None:
    """The line of the program that is running now; None if the program waits for others in a library.

    Args:
        stack: the stacks of the task.
        waits: whether the main thread waits, according to the kernel.
    """
    own = stack.own
    if own is not None and not waits and not any(map(_is_waiting, stack.main[: stack.main.index(own)])):
        return own
    # TensorFlow's own threads call the program for the next batch; threads that the program started do not count.
    fed = (frames for frames in stack.others if any("/tensorflow/" in file for file, _, _ in frames))
    return next((frames[0] for frames in fed if _own_frame(frames) is frames[0]), None)


def _is_waiting(frame: Frame) -> bool:
    parts = frame[0].split("/")
    return parts[-1] in _WAITING or not {"tensorflow", "keras", "multiprocessing"}.isdisjoint(parts)


def _place(stack: Stack, tasks: int) -> str:
    if not stack.main:
        return f"{'has' if tasks == 1 else 'have'} no Python stack to show"
    where = f"{'is' if tasks == 1 else 'are'} {_render_place(stack.main)}"
    others = [f"; another thread {_render_place(frames)}" for frames in stack.others[:SHOWN_THREADS]]
    return where + "".join(others)


def _render_place(frames: Sequence[Frame]) -> str:
    inner = frames[0]
    own = _own_frame(frames) or inner
    where = f"at {own[0]}:{own[1]} {own[2]}"
    return where if inner is own else f"{where}, in {inner[2]} of {inner[0].rpartition('/')[2]}"


def _render_frames(frames: Sequence[Frame]) -> list[str]:
    return [f"    {file}:{line} {function}" for file, line, function in frames]


def is_out_of_step(event: TaskExited) -> bool:
    """Whether the task failed because its peers ran a different operation."""
    return event.crash is not None and OUT_OF_STEP.search(event.crash.message) is not None


def render_split(state: AttemptState) -> str:
    """Each task's place: `worker:0 is in evaluate at train.py:31, worker:1 in fit at train.py:29`; empty if unknown."""
    places, unknown = _find_places(state)
    groups = [(tasks, _render_call(place)) for place, tasks in places.items()]
    if not groups:
        return ""
    if len(groups) == 1 and not unknown:
        return f"all are {groups[0][1]}"
    if unknown:
        groups.append((unknown, "somewhere unknown"))
    (tasks, where), *others = groups
    first = f"{name_tasks(tasks)} {'is' if len(tasks) == 1 else 'are'} {where}"
    return ", ".join([first, *(f"{name_tasks(tasks)} {where}" for tasks, where in others)])


def find_outsider(state: AttemptState) -> TaskId | None:
    """The one task that was elsewhere, if at least two others were together."""
    places, unknown = _find_places(state)
    alone = [tasks[0] for tasks in places.values() if len(tasks) == 1]
    return alone[0] if len(places) == 2 and len(alone) == 1 and not unknown else None


def _find_places(state: AttemptState) -> tuple[dict[SourceLine, list[TaskId]], list[TaskId]]:
    """The training tasks by their places, and those whose place is not known."""
    places: dict[SourceLine, list[TaskId]] = {}
    unknown = []
    for task in sorted(state.policy.trainers):
        place = _find_place(state, task)
        if place is None:
            unknown.append(task)
        else:
            places.setdefault(place, []).append(task)
    return _merge_calls(places), unknown


def _merge_calls(places: Mapping[SourceLine, list[TaskId]]) -> dict[SourceLine, list[TaskId]]:
    """The same places, where a line whose call is not known counts as the same line with the only known call."""
    merged: dict[SourceLine, list[TaskId]] = {}
    for place, tasks in places.items():
        known = [other for other in places if (other.file, other.line) == (place.file, place.line) and other.call]
        merged.setdefault(known[0] if place.call is None and len(known) == 1 else place, []).extend(tasks)
    return {place: sorted(tasks) for place, tasks in merged.items()}


def _find_place(state: AttemptState, task: TaskId) -> SourceLine | None:
    event = state.exits.get(task)
    if event is not None and event.crash is not None and event.crash.place is not None:
        return event.crash.place
    return find_call(state.stacks[task]) if task in state.stacks else None


def _render_call(place: SourceLine) -> str:
    return f"{f'in {place.call} ' if place.call else ''}at {place.file}:{place.line}"
