"""Collects the Python stacks of running tasks without stopping the tasks, even if they are blocked in C++.

On a signal, faulthandler writes the stacks of a task, and of processes that the task has forked, to the task's file.
The agent sends it only to processes that have this file open: faulthandler writes to a descriptor by its number, which
belongs to another file in a program that has closed all descriptors it did not open. The agent reads the files when
none of them grows any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping

from worker_entry.agent.tasks.task import StartedTask
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import CHILD, Stacks
from worker_entry.protocol.node_local import STACKS_SIGNAL
from worker_entry.protocol.values import Activity
from worker_entry.system import kernel as system_calls
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.kernel import Process

WAIT_S = 0.3
"""A file is complete when it has not grown for this time."""
NEXT_S = 0.05
"""How long most processes take to write their stacks."""
ROUNDS = 20
"""Rounds of signals to child processes; with more children than rounds, each round signals several children."""
LIMIT = 256 << 10
SAMPLE_S = 5.0
"""How often samples are taken."""
BUSY_SHARE = 0.1
"""Share of one core; a task that uses more is at work. A worker that waits in a collective uses a fiftieth."""
BUSY_BYTES_S = 16 << 10
"""Bytes per second read and written; a task that moves more is at work. Heartbeats take a few hundred."""
SHORTEST_S = 0.25
"""CPU time is counted in hundredths of a second: over a shorter interval it means nothing."""


class StackDump:
    """Signals all processes and reads the stacks that they write."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._activity = ActivityWatch(kernel)
        self._files: dict[str, str] = {}
        self._paths: frozenset[str] = frozenset()
        """The files, without symbolic links."""
        self._rounds: list[list[int]] = []
        self._begins: list[dict[str, int]] = []
        """The sizes of the files when each round began."""
        self._sizes: dict[str, int] = {}
        self._due = 0.0
        self.cluster_ports: frozenset[int] = frozenset()
        """The ports of all tasks of the cluster."""

    @property
    def pending(self) -> bool:
        return bool(self._files)

    def begin(self, tasks: Mapping[str, StartedTask], processes: Iterable[Process]) -> None:
        """Starts to signal the tasks' own processes, then all processes below them."""
        self._activity.begin(tasks)
        own = {task.pid for task in tasks.values() if task.running}
        children = [process.pid for process in processes if process.pid not in own]
        size = -(-len(children) // ROUNDS) or 1
        self._files = {name: task.stacks_file for name, task in tasks.items()}
        self._paths = frozenset(map(os.path.realpath, self._files.values()))
        self._rounds = [[*own], *(children[first : first + size] for first in range(0, len(children), size))]
        self._begins = []
        self._due = 0.0

    def forget(self) -> None:
        """Called when the attempt has ended: the next one has other tasks."""
        self._activity = ActivityWatch(self._kernel)
        self._files, self._rounds = {}, []

    def poll(self, tasks: Mapping[str, StartedTask], now: float) -> Iterator[Stacks]:
        """Yields the answers once all are complete; `now` is in monotonic seconds."""
        self._activity.poll(tasks, now)
        texts = dict(self._collect(now))
        activity = self._activity.report(tasks, texts, self.cluster_ports) if texts else {}
        for task, text in texts.items():
            yield Stacks(task, text, activity.get(task, Activity()))

    def _collect(self, now: float) -> Iterator[tuple[str, str]]:
        """Yields each task's name and stacks once all are complete; the stacks of a task that wrote none are empty."""
        if not self.pending or now < self._due:
            return
        sizes = {file: _size(file) for file in self._files.values()}
        if self._rounds:
            # A task and its forked processes write to one file, so they must write in turn, or their stacks would mix.
            self._begins.append(sizes)
            for pid in self._rounds.pop(0):
                if self._can_write(pid):
                    with contextlib.suppress(OSError):  # the process has just ended
                        self._kernel.kill(pid, STACKS_SIGNAL)
            self._due = now + (NEXT_S if self._rounds else WAIT_S)
        elif sizes != self._sizes:
            self._sizes, self._due = sizes, now + WAIT_S
        else:
            files, self._files = self._files, {}
            for task, file in files.items():
                yield task, _read(file, [begin[file] for begin in self._begins])

    def _can_write(self, pid: int) -> bool:
        """Whether the process still has one of the files open."""
        if not system_calls.LINUX:
            return True
        return not self._paths.isdisjoint(self._kernel.open_files(pid))


def _read(file: str, begins: list[int]) -> str:
    """Reads the output after the first of these sizes; at each of the other sizes, a child's output begins."""
    text = b""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        stream.seek(begins[0])
        text = stream.read(LIMIT)
    cuts = [size - begins[0] for size in begins]
    parts = [text[cut:end].decode(errors="replace") for cut, end in zip(cuts, [*cuts[1:], len(text)])]  # noqa: B905 - Python 3.9 has no `strict`
    return CHILD.join([parts[0], *filter(None, parts[1:])])


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


@dataclass(frozen=True)
class _Sample:
    time: float
    cpu_s: float
    bytes: int
    log: int
    processes: int


class ActivityWatch:
    """Remembers when each task was last at work: by its CPU time, the bytes that it reads and writes, and its log.

    A task that waits for others in a collective uses almost nothing, however long it waits. A task that exports a model
    or evaluates takes no step for a while either, but it is at work.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._samples: dict[str, _Sample] = {}
        """The last samples of the tasks' own processes."""
        self._trees: dict[str, _Sample] = {}
        """Samples of all processes of the tasks, taken by `begin`; not comparable with `_samples`."""
        self._active: dict[str, float] = {}
        self._due = 0.0

    def poll(self, tasks: Mapping[str, StartedTask], now: float) -> None:
        """Samples the tasks' own processes if a sample is due; `now` is in monotonic seconds."""
        if now >= self._due:
            self._due = now + SAMPLE_S
            samples = {name: self._sample(task, [task.pid], now) for name, task in tasks.items() if task.running}
            self._samples = self._compare(self._samples, samples)

    def begin(self, tasks: Mapping[str, StartedTask]) -> None:
        """Begins to observe all processes of the tasks; `report` ends this."""
        self._trees = self._sample_trees(tasks)

    def report(
        self, tasks: Mapping[str, StartedTask], texts: Mapping[str, str], ports: Collection[int]
    ) -> dict[str, Activity]:
        """Each task's activity, from all samples so far, and from its stacks; `ports`: those of the whole cluster."""
        if not system_calls.LINUX:
            return {name: Activity() for name in tasks}
        trees = self._sample_trees(tasks)
        self._compare(self._trees, trees)
        self._trees = {}
        now = self._kernel.monotonic()
        single = {tasks[name].pid: texts.get(name, "") for name, tree in trees.items() if tree.processes == 1}
        mutual = self._kernel.find_waiting(single, ports)
        return {
            name: Activity(
                now - self._active[name] if name in self._active else None,
                self._kernel.waits(task.pid),
                task.pid in mutual,
            )
            for name, task in tasks.items()
        }

    def _compare(self, earlier: Mapping[str, _Sample], samples: Mapping[str, _Sample]) -> dict[str, _Sample]:
        """Notes which tasks were at work between two samples; returns those to compare the next ones with."""
        kept = {}
        for name, sample in samples.items():
            kept[name] = sample
            before = earlier.get(name)
            if before is None:
                self._active.setdefault(name, sample.time)
                continue
            passed_s = sample.time - before.time
            if passed_s < SHORTEST_S:
                kept[name] = before
                continue
            used = sample.cpu_s - before.cpu_s > BUSY_SHARE * passed_s
            moved = sample.bytes - before.bytes > BUSY_BYTES_S * passed_s
            if used or moved or sample.log != before.log:
                self._active[name] = sample.time
        return kept

    def _sample_trees(self, tasks: Mapping[str, StartedTask]) -> dict[str, _Sample]:
        now = self._kernel.monotonic()
        running = {name: task for name, task in tasks.items() if task.running}
        below = {name: [process.pid for process in self._kernel.below(task.pid)] for name, task in running.items()}
        return {name: self._sample(task, [task.pid, *below[name]], now) for name, task in running.items()}

    def _sample(self, task: StartedTask, pids: Collection[int], now: float) -> _Sample:
        uses = [self._kernel.read_use(pid) for pid in pids]
        moved = sum(use.read + use.written for use in uses)
        return _Sample(now, sum(use.cpu_s for use in uses), moved, task.log.size(), len(pids))
