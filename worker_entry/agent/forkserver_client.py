"""An agent's side of its forkserver: when there is one, and when a task had better be started by itself."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Optional

from worker_entry.program.environment import LATE, ProgramEnv, find_program_env
from worker_entry.program.finding import folder_of, may_import
from worker_entry.protocol import environment
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.node_local import GO
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program, TaskOrder, TaskStatus
from worker_entry.system import kernel, processes

TENSORFLOW = "tensorflow"
IMPORT_S = 120.0
"""An import that takes longer is not waited for."""
FORK_S = 5.0
"""A process that does not fork within so long is given up: the agent waits for it, and for nothing else."""
TENSORFLOW_PACKAGES = ("tensorflow", "keras", "tf_keras")
"""A program without one of these words has no use for a forkserver."""


class ForkserverError(Exception):
    """A task cannot be forked; why, for the user."""


class ForkserverClient:
    """At most one process at a time. `pids` has it, for those who must spare it.

    `settled`: whether it makes no difference any more to wait for it.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.pids: set[int] = set()
        self.problem = ""
        """Why nothing is forked, if something speaks against it."""
        self._selector = selector
        self._control: Optional[socket.socket] = None
        self._env: dict[str, str] = {}
        """That of the import: what all tasks have in common, and what the program will have set by then."""
        self._program_env = ProgramEnv()
        self._unanswered = 0
        """Imports that were asked for, and have not been done yet."""
        self._modules: list[str] = []
        """What is still to be imported once the program's folder is there."""
        self._deadline = 0.0
        self._order: Optional[Preload] = None

    @property
    def wanted(self) -> bool:
        return self._order is not None and kernel.LINUX

    def settled(self, now: float) -> bool:
        """`now`: monotonic seconds."""
        if self._control is not None and self._unanswered and now > self._deadline:
            self._fail(f"the import of TensorFlow has taken more than {IMPORT_S:g} s")
        return self._control is None or not self._unanswered

    def begin(self, order: Preload, cwd: str, log: str) -> None:
        """Starts it, if there is none yet and the program has a use for it."""
        if not may_import(order.program, cwd, TENSORFLOW_PACKAGES):
            return
        self._order = order
        if not self.wanted or (self._control is not None and self.pids):
            return
        self._forget()
        env = {name: value for name, value in os.environ.items() if name not in order.unset}
        env.update(order.env)
        self._program_env = find_program_env(order.program, cwd, env, TENSORFLOW_PACKAGES)
        self.problem = _explain(self._program_env)
        if self.problem:
            return
        self._env = self._program_env.over(env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with theirs:
                pid = processes.spawn(
                    [sys.executable, PACKAGE, "forkserver"],
                    env=self._env,
                    cwd=cwd if os.path.isdir(cwd) else os.sep,
                    output=output,
                    stdin=theirs.fileno(),
                )
        except (OSError, ValueError) as error:  # a null byte in the environment
            ours.close()
            self.problem = f"no process for it: {getattr(error, 'strerror', error)}"
            return
        finally:
            os.close(output)
        self.pids.add(pid)
        self._control, self._modules = ours, list(order.modules)
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        self._ask_for([TENSORFLOW])

    def expect(self, program: Program, cwd: str) -> None:
        """The program is there, and will be started: what is left to be imported may be its own."""
        if not may_import(program, cwd, TENSORFLOW_PACKAGES):
            self.dismiss()
        if self._control is None:
            return
        env = {name: value for name, value in self._env.items() if name not in self._program_env.changes}
        found = find_program_env(program, cwd, env, TENSORFLOW_PACKAGES)
        if found.changes != self._program_env.changes or found.unclear:
            self._fail(_explain(found) or "the program sets other variables than when TensorFlow was imported")
        elif self._modules:
            modules, self._modules = self._modules, []
            self._ask_for(modules, folder_of(program, cwd))

    def fork(self, order: TaskOrder, env: Mapping[str, str], cwd: str, log: str, order_file: str) -> int:
        """Starts the task; returns its pid, a child's of this process.

        Args:
            order: what it runs.
            env: its environment.
            cwd: its working directory.
            log: the file of its output.
            order_file: where the order is written if the task has to start again as plain Python.

        Raises:
            NurseryError: it has to be started by itself; the message says why, and is empty if nobody expects more.
        """
        if not self.wanted:
            raise ForkserverError("")
        if self._control is None or self._unanswered:
            raise ForkserverError(self.problem or "TensorFlow is not imported yet")
        different = _find_difference(self._env, self._program_env.over(dict(env)))
        if different is not None:
            raise ForkserverError(f"{different} of its environment is another one than when TensorFlow was imported")
        request = {"order": asdict(order), "env": dict(env), "cwd": cwd, "log": log, "order_file": order_file}
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with gate:
            gate.settimeout(FORK_S)
            try:
                with theirs:
                    data = json.dumps(request).encode()
                    self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
                    socket.send_fds(self._control, [data], [theirs.fileno()])
                answer = gate.recv(4096)
                if answer[:1].isdigit():
                    gate.sendall(GO)
                    return int(answer)
            except OSError as error:
                self._fail(f"the process with TensorFlow does not answer: {error}")
                raise ForkserverError(self.problem) from None
        if not answer:
            raise ForkserverError("the process with TensorFlow did not fork")
        raise ForkserverError(json.loads(answer)["problem"])

    def is_refused(self, status: TaskStatus) -> bool:
        """Whether a task tells that it cannot do with an early import, which is news: then there will be none."""
        is_news = bool(status.not_forked) and self.wanted
        if is_news:
            self.dismiss(status.not_forked)
        return is_news

    def rest(self) -> None:
        """All tasks have been forked: it is kept only for those that may be started again."""
        if self._order is not None and not self._order.keep:
            self.dismiss()

    def dismiss(self, problem: str = "") -> None:
        """Nothing will be forked any more; `problem` says why, if that is worth telling."""
        self._fail(problem)
        self._order = None

    def revive(self, cwd: str, log: str) -> None:
        """Starts it anew if it has died since."""
        if self._order is not None and not self.pids and not self.problem:
            self.begin(self._order, cwd, log)

    def end(self) -> None:
        """Ends it, and waits for that."""
        for pid in list(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.pids.clear()
        self._forget()

    def _hear(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except OSError:
            data = b""
        if not data:
            # One that has been of use is started again for the next attempt.
            self._fail("" if not self._unanswered else "the process that imported TensorFlow has ended")
        elif problem := json.loads(data)["problem"]:
            self._fail(problem)
        else:
            self._unanswered -= 1

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.end()

    def _forget(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        self._control, self._unanswered, self._modules = None, 0, []

    def _ask_for(self, modules: list[str], folder: Optional[str] = None) -> None:
        assert self._control is not None
        self._unanswered += 1
        self._deadline = time.monotonic() + IMPORT_S
        with contextlib.suppress(OSError):  # it has ended already, which is heard of
            self._control.sendall(json.dumps({"modules": modules, "folder": folder}).encode())


def _explain(found: ProgramEnv) -> str:
    """Why nothing is imported early for a program that sets variables in a way that only it can tell."""
    for name, place in sorted(found.unclear.items()):
        return f"{place} may set {name}, which the import of TensorFlow reads"
    return ""


def _find_difference(one: Mapping[str, str], other: Mapping[str, str]) -> Optional[str]:
    """The first variable that differs and that an import may read."""
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name) and name not in LATE and not name.startswith(environment.OWN_PREFIX):
            return name
    return None
