"""An agent's side of its nursery: when there is one, and when a task had better be started by itself."""

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

from worker_entry import kernel, processes
from worker_entry.nursery import GO
from worker_entry.orders import Preload
from worker_entry.values import TaskOrder

IMPORT_S = 120.0
"""An import that takes longer is not waited for."""
FORK_S = 10.0
FORK_AGAIN_S = 1.0
"""For the next task, when one has waited in vain: an agent that takes no turn for long is killed."""
LATE = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "no_grpc_proxy")
"""Variables that no import reads; nor those of our own."""
OWN_PREFIX = "DISTLAUNCH_"
TENSORFLOW_PACKAGES = ("tensorflow", "keras", "tf_keras")
"""A program without one of these words has no use for a nursery."""


class NurseryError(Exception):
    """A task cannot be forked; why, for the user."""


class Nursery:
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
        self._ready = False
        self._deadline = 0.0
        self._fork_s = FORK_S
        self._order: Optional[Preload] = None

    @property
    def wanted(self) -> bool:
        return self._order is not None and kernel.LINUX

    def settled(self, now: float) -> bool:
        """`now`: monotonic seconds."""
        if self._control is not None and not self._ready and now > self._deadline:
            self._fail(f"the import of TensorFlow has taken more than {IMPORT_S:g} s")
        return self._control is None or self._ready

    def begin(self, order: Preload, cwd: str, log: str) -> None:
        """Starts it, if there is none yet."""
        self._order = order
        if not self.wanted or (self._control is not None and self.pids):
            return
        self._forget()
        self.problem = ""
        self._env = {name: value for name, value in os.environ.items() if name not in order.unset}
        self._env.update(order.env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.path.dirname(os.path.abspath(__file__))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with theirs:
                pid = processes.spawn(
                    [sys.executable, here, "nursery"],
                    env=self._env,
                    cwd=cwd if os.path.isdir(cwd) else os.sep,
                    output=output,
                    stdin=theirs.fileno(),
                )
        except OSError as error:
            ours.close()
            self.problem = f"no process for it: {error.strerror}"
            return
        finally:
            os.close(output)
        self.pids.add(pid)
        self._control, self._ready, self._deadline = ours, False, time.monotonic() + IMPORT_S
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        ours.sendall(json.dumps({"modules": order.modules}).encode())

    def fork(self, order: TaskOrder, env: Mapping[str, str], cwd: str, log: str) -> int:
        """Starts the task; returns its pid, a child's of this process.

        Raises:
            NurseryError: it has to be started by itself; the message says why, and is empty if nobody expects more.
        """
        if not self.wanted:
            raise NurseryError("")
        if self._control is None or not self._ready:
            raise NurseryError(self.problem or "TensorFlow is not imported yet")
        different = _find_difference(self._env, env)
        if different is not None:
            raise NurseryError(f"{different} of its environment is another one than when TensorFlow was imported")
        request = {"order": asdict(order), "env": dict(env), "cwd": cwd, "log": log}
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with gate:
            gate.settimeout(self._fork_s)
            try:
                with theirs:
                    data = json.dumps(request).encode()
                    self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
                    socket.send_fds(self._control, [data], [theirs.fileno()])
                answer = gate.recv(4096)
                self._fork_s = FORK_S
                if answer[:1].isdigit():
                    gate.sendall(GO)
                    return int(answer)
            except OSError as error:
                self._fork_s = FORK_AGAIN_S
                raise NurseryError(f"the process with TensorFlow does not answer: {error}") from None
        if not answer:
            raise NurseryError("the process with TensorFlow did not fork")
        raise NurseryError(json.loads(answer)["problem"])

    def rest(self) -> None:
        """All tasks have been forked: it is kept only for those that may be started again."""
        if self._order is not None and not self._order.keep:
            self.dismiss()

    def dismiss(self) -> None:
        """Nothing will be forked any more."""
        self.end()
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
            self._fail("" if self._ready else "the process that imported TensorFlow has ended")
        elif problem := json.loads(data)["problem"]:
            self._fail(problem)
        else:
            self._ready = True

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.end()

    def _forget(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        self._control, self._ready = None, False


def _find_difference(one: Mapping[str, str], other: Mapping[str, str]) -> Optional[str]:
    """The first variable that differs and that an import may read."""
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name) and name not in LATE and not name.startswith(OWN_PREFIX):
            return name
    return None
