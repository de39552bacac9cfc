"""The tasks of an agent's attempt, from their start until the controller has heard of their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker_entry.agent.forkserver_client import ForkserverClient
from worker_entry.agent.task_process import StartedTask
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.messages import Message, Noted, Started
from worker_entry.protocol.orders import Attach, Start
from worker_entry.protocol.values import TaskExit
from worker_entry.system import clock
from worker_entry.system.oom import OomWatch
from worker_entry.system.ports import HeldPorts
from worker_entry.system.processes import Tree

Send = Callable[[Message], None]


class RunningTasks:
    """All tasks that were started, by their names; `turns`: whose log is to be sent next."""

    def __init__(self, send: Send, ports: HeldPorts) -> None:
        self.by_name: dict[str, StartedTask] = {}
        self.turns: deque[StartedTask] = deque()
        self._send = send
        self._ports = ports
        self._oom = OomWatch()

    def __bool__(self) -> bool:
        return bool(self.by_name)

    @property
    def pids(self) -> list[int]:
        """Of those that have not ended."""
        return [task.pid for task in self.by_name.values() if task.running]

    def is_running(self, name: str) -> bool:
        return name in self.by_name and self.by_name[name].running

    def start(self, order: Start, files: AttemptFiles, cwd: str, tree: Tree, forkserver: ForkserverClient) -> None:
        """Starts them all; one that has ended may be started again.

        Raises:
            TaskStartError: one could not be started, nor was any after it.
        """
        reasons = set()
        for start in order.tasks:
            before = self.by_name.get(start.task)
            if before is not None:  # it is started again alone
                files.forget(start.task)
            task = StartedTask.start(start, order.cluster, files, cwd, forkserver)
            if before is not None:  # and writes on
                self.turns.remove(before)
                task.follow(before)
                before.close()
            self.by_name[start.task] = task
            self._ports.forming |= {start.task} & self._ports.numbers.keys()
            self.turns.append(task)
            tree.add(task.pid)
            self._send(Started(start.task, task.pid, clock.now()))
            reasons.add(task.not_forked)
        for reason in sorted(filter(None, reasons)):
            self._send(Noted(f"tasks are started one by one, without an import done ahead: {reason}"))
        forkserver.rest()

    def note_exit(self, pid: int, status: int) -> None:
        ended = clock.now()
        for task in self.by_name.values():
            if task.pid == pid:
                task.running = False
                self._ports.forming.discard(task.name)
                for told in task.new_status():  # the last word of one that was killed
                    self._send(told)
                self._send(task.report_end(TaskExit.from_wait_status(status), ended, self._oom))

    def rewind(self, attach: Attach, attempt: int) -> None:
        """Logs go on where the controller has them until."""
        for task in self.by_name.values():
            task.rewind(attach.offsets.get(task.name, 0) if attach.attempt == attempt else 0)

    def forget(self) -> None:
        for task in self.by_name.values():
            task.close()
        self.by_name = {}
        self.turns.clear()
