"""The tasks of an agent's attempt, from their start until the controller knows that they have ended."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from worker_entry.agent.tasks.forkserver import ForkserverClient
from worker_entry.agent.tasks.input import TaskInput
from worker_entry.agent.tasks.task import StartedTask
from worker_entry.agent.tasks.tree import Tree
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.messages import Message, Noted
from worker_entry.protocol.orders import Attach, Start
from worker_entry.protocol.values import TaskExit
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.ports import HeldPorts

Send = Callable[[Message], None]


class RunningTasks:
    """All tasks that were started, by name; `log_queue` is the order in which their logs are sent."""

    def __init__(self, send: Send, ports: HeldPorts, kernel: Kernel) -> None:
        self.by_name: dict[str, StartedTask] = {}
        self.log_queue: deque[StartedTask] = deque()
        self._send = send
        self._ports = ports
        self._kernel = kernel
        self._oom = kernel.watch_memory()

    def __bool__(self) -> bool:
        return bool(self.by_name)

    @property
    def pids(self) -> list[int]:
        """The pids of the tasks that have not ended."""
        return [task.pid for task in self.by_name.values() if task.running]

    def find_unaware(self, tree: Tree) -> set[int]:
        """The processes that neither catch nor block SIGTERM; TensorFlow's own, ineffective handler does not count."""
        watched = {task.pid: task.has_handler for task in self.by_name.values() if task.is_watched and task.running}

        def is_aware(pid: int) -> bool:
            return watched[pid] if pid in watched else self._kernel.may_notice(pid, signal.SIGTERM)

        return {process.pid for process in tree.living() if not is_aware(process.pid)}

    def is_running(self, name: str) -> bool:
        return name in self.by_name and self.by_name[name].running

    def start(
        self,
        order: Start,
        files: AttemptFiles,
        cwd: str,
        tree: Tree,
        forkserver: ForkserverClient,
        make_input: Callable[[str], TaskInput],
    ) -> None:
        """Starts the tasks in order; a task that has ended may be started again.

        Raises:
            TaskStartError: a task could not be started; those after it were not tried.
        """
        reasons = set()
        for start in order.tasks:
            before = self.by_name.get(start.task)
            if before is not None:  # restarted individually
                files.forget(start.task)
            task = StartedTask.start(start, order.cluster, files, cwd, forkserver, make_input, self._kernel)
            if before is not None:  # it appends to the same log
                self.log_queue.remove(before)
                task.follow(before)
            self.by_name[start.task] = task
            self._ports.forming |= {start.task} & self._ports.numbers.keys()
            self.log_queue.append(task)
            tree.add(task.pid)
            self._send(task.started)
            reasons.add(task.not_forked)
        for reason in sorted(filter(None, reasons)):
            self._send(Noted(f"tasks are not forked from a preloaded {forkserver.library}: {reason}"))
        forkserver.release_unless_kept()

    def note_exits(self, exits: Sequence[tuple[int, int]], stopped: Mapping[int, float]) -> None:
        """Reports the ends of processes, given as pids and wait statuses; `stopped` is that of their tree."""
        ended = self._kernel.now()
        if exits:  # an end stops the attempt, and the controller then ignores how far the other tasks have come
            for task in self.by_name.values():
                if task.running:
                    for last in task.new_status():
                        self._send(last)
        for pid, status in exits:
            self._note_exit(pid, status, ended, stopped.get(pid))

    def _note_exit(self, pid: int, status: int, ended: float, stopped: Optional[float]) -> None:
        for task in self.by_name.values():
            if task.running and task.pid == pid:
                task.running = False
                self._ports.forming.discard(task.name)
                if task.input is not None:
                    task.input.close()
                how = TaskExit.from_wait_status(status)
                if how.ok:  # an exit handler may have hidden the program's exception since the last look
                    self._send_raised(task)
                task.ended = task.report_end(how, ended, self._oom, stopped)
                self._send(task.ended)

    def _send_raised(self, task: StartedTask) -> None:
        for returned in task.new_return():
            if returned.crash is not None:
                self._send(returned)

    def report_again(self) -> None:
        """Reports the start, the last state and the end of each task again: a new controller may not know them."""
        for task in self.by_name.values():
            self._send(task.started)
            if task.ended is not None:
                self._send(task.ended)
                continue
            for status in task.status_again():
                self._send(status)
            for message in (task.halted, task.returned):
                if message is not None:
                    self._send(message)

    def observe_logs(self, *, last: bool = False) -> None:
        """Indexes what has been written; `last`: nothing more will be."""
        if self.by_name:
            self._oom.poll(self._kernel.monotonic())
        for task in self.by_name.values():
            task.log.observe(last=last)

    def rewind(self, attach: Attach, attempt: int) -> None:
        """Sends the logs again from the offsets that the controller has reached."""
        for task in self.by_name.values():
            task.log.rewind(attach.offsets.get(task.name, 0) if attach.attempt == attempt else 0)

    def forget(self) -> None:
        for task in self.by_name.values():
            task.close()
        self.by_name = {}
        self.log_queue.clear()
