"""A process that has imported TensorFlow, and forks tasks from there: `import tensorflow` is paid for once.

It is a child of the agent, which sends it one request for each task, with one end of a pair of sockets. The forkserver
forks twice and the process between exits, so that the task becomes the agent's own child; it says its pid, and waits
for the agent's word. From then on it is as if it had been started by itself, with its imports done.

A fork is safe while nothing of TensorFlow has run: then it has started no threads that a fork would lose. What the
program does before it imports TensorFlow has its effect all the same: see `early_import`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Optional

from worker_entry.program.finding import folder_of
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.node_local import GO
from worker_entry.protocol.values import Injection, Program, TaskOrder
from worker_entry.system import kernel
from worker_entry.task.early_import import NUMPY, EarlyImport

MESSAGE_LIMIT = 4 << 20
IMPORT_THREADS = 4
"""Threads that TensorFlow's import may leave behind; it leaves two, which wait for work."""


def serve() -> Optional[TaskOrder]:
    """Imports what messages name, and forks a task for each message that comes with a socket.

    Returns only in a task, with what it has to run, or with None when the agent is gone.
    """
    agent = os.getppid()
    control = socket.socket(fileno=os.dup(0))
    _point_to(os.devnull, 0)
    early, problem = EarlyImport(), ""
    while True:
        message = _receive(control)
        if message is None:
            return None
        request, gates = message
        if not gates:
            problem = problem or _import(early, request["modules"], request["folder"])
            _answer(control, problem=problem)
            continue
        [gate] = gates
        hindrance = problem or _find_problem(request)
        if hindrance:
            _answer(gate, problem=hindrance)
        elif _fork_away(agent):
            control.close()
            _become_task(request, gate, agent)
            early.hide(functools.partial(_start_again, request))
            return _make_order(request)
        gate.close()


def _import(early: EarlyImport, modules: Sequence[str], folder: Optional[str]) -> str:
    """Imports them, first of all from that folder; returns why nothing may be forked from here, if something is."""
    before = sys.path[:]
    gc.disable()  # an import makes many objects and little garbage: it takes a fifth less without a collector
    try:
        with contextlib.suppress(ImportError):
            early.load(NUMPY)  # whose library for matrices has threads, and forks well
        threads = _count_threads()
        sys.path[:0] = [] if folder is None else [folder]
        for module in modules:
            early.load(module)
    except BaseException as error:  # noqa: BLE001 - the import runs anything, and the tasks will tell of it themselves
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        sys.path[:] = before
        gc.freeze()  # what a collector never looks at stays shared with the tasks
        gc.enable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else each task would say it again
    if threading.active_count() > 1 or _count_threads() > threads + IMPORT_THREADS:
        return "an import has started threads, which a fork would lose"
    if any(name.startswith("/dev/nvidia") for name in _open_files()):
        return "an import has initialised CUDA, which does not survive a fork"
    return ""


def _make_order(request: dict[str, Any]) -> TaskOrder:
    order = dict(request["order"])
    program = Program(**order.pop("program"))
    injections = [Injection(**injection) for injection in order.pop("injections")]
    return TaskOrder(program, injections=injections, **order)


def _start_again(request: dict[str, Any], why: str) -> NoReturn:
    """In a task: the same process becomes a plain Python, whose program begins anew."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have put anything there
            stream.flush()
    order = {**request["order"], "not_forked": why}
    file = request["order_file"]
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(order, stream)
    os.chdir(request["cwd"])
    os.execve(sys.executable, [sys.executable, PACKAGE, "task", file], request["env"])  # noqa: S606 - there is no shell


def _find_problem(request: dict[str, Any]) -> str:
    """Why a plain start would find another module than what is imported here."""
    folder = folder_of(Program(**request["order"]["program"]), request["cwd"])
    # A plain start has this package of its own, too, before the program's folder is looked at.
    ours = {name.partition(".")[0] for name in sys.modules} - {"__main__", __name__.partition(".")[0]}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            name = entry.name.partition(".")[0]
            is_module = entry.name.endswith((".py", ".so")) or os.path.exists(os.path.join(entry.path, "__init__.py"))
            if name in ours and is_module and not _is_at(sys.modules.get(name), entry.path):
                return f"{entry.path} hides a module of that name, which is imported already"
    return ""


def _is_at(module: Any, path: str) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith(path)


def _fork_away(agent: int) -> bool:
    """Whether this is the new process, now a child of the agent's; the caller goes on in both."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    if os.fork():
        os._exit(0)
    while os.getppid() != agent:
        time.sleep(0.0002)
    return True


def _become_task(request: dict[str, Any], gate: socket.socket, agent: int) -> None:
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL, agent)
    try:
        _point_to(request["log"], 1)
        os.dup2(1, 2)
        os.chdir(request["cwd"])
        gate.sendall(b"%d\n" % os.getpid())
        if gate.recv(len(GO)) != GO:
            os._exit(1)
    except OSError:  # nobody waits for us any more; else the agent sees that nobody answers
        os._exit(1)
    gate.close()
    os.environ.clear()
    os.environ.update(request["env"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does it by itself


def _receive(control: socket.socket) -> Optional[tuple[dict[str, Any], list[socket.socket]]]:
    """The next message, with the sockets that came along; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, 1)
    if not data:
        return None
    return json.loads(data), [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _answer(to: socket.socket, *, problem: str) -> None:
    with contextlib.suppress(OSError):  # the agent is gone, or waits no longer
        to.sendall(json.dumps({"problem": problem}).encode() + b"\n")


def _point_to(path: str, descriptor: int) -> None:
    flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, descriptor)
    if opened != descriptor:
        os.close(opened)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> list[str]:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself, which is closed by now
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return names
