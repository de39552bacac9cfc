"""Imports the framework once, and forks tasks that already have it in memory.

The forkserver is a child of the agent, which sends it one request for each task, with one end of a socket pair. The
forkserver forks twice and the intermediate process exits, so that the task becomes a child of the agent. The task sends
its pid and waits for the agent's answer. From then on, the task behaves as if it had been started as plain Python and
had already done its imports.

A forkserver that was started before its run has a folder writes to a file without a name, until it is told its log
(`log`). A forkserver can be kept for a later run: the agent asks whether it can be kept (`keep`) and, before using it
again, whether its imports are still up to date (`renew`).

A fork is safe as long as the framework has not run anything, because until then it starts no threads that it would
miss after a fork. JAX's import leaves no thread, no descriptor and no native random state; its threads, and its warning
about forks, come with its backend. Settings that the program makes before its imports still take effect: see
`early_import`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Optional

from worker_entry.program.finding import folder_of
from worker_entry.protocol import environment
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.node_local import GO
from worker_entry.protocol.values import Injection, Program, TaskOrder
from worker_entry.system import clock, kernel
from worker_entry.system.own_environ import overwrite
from worker_entry.task.early_import import NUMPY, EarlyImport
from worker_entry.task.import_snapshot import ImportSnapshot, find_foreign

MESSAGE_LIMIT = 4 << 20
LOG_LIMIT = 1 << 20
"""The output of early imports that is kept until there is a file for it, in bytes."""
NO_NAME = "the run id that /proc shows for a kept process cannot be changed"
IMPORT_THREADS = 4
"""The number of threads that TensorFlow's import may leave behind; usually, it leaves two idle threads."""
KERAS, SCIPY = "keras", "scipy.linalg"


def serve() -> Optional[TaskOrder]:
    """Imports the modules that messages name, and forks a task for each message that comes with a socket.

    Returns the order in a forked task, or None in the forkserver when the agent is gone.
    """
    agent = os.getppid()
    control = socket.socket(fileno=os.dup(0))
    _point_to(os.devnull, 0)
    early, problem, path = EarlyImport(), "", _RelativePath()
    kept = ImportSnapshot(time.time())
    while True:
        message = _receive(control)
        if message is None:
            return None
        request, gate, stdin = message
        if gate is None:
            if "keep" in request:
                problem = problem or _explain_foreign() or ("" if overwrite(environment.RUN_ID) else NO_NAME)
                _answer(control, problem=problem, reads=early.reads)
                os.chdir(os.sep)  # so that the disk of the current folder can be unmounted
                _point_to(os.devnull, 1)
                os.dup2(1, 2)
                kept.record()  # after the answer, because a user waits for the answer
            elif "renew" in request:
                problem = problem or kept.problem or kept.find_change()
                _point_to(request["renew"], 1)
                os.dup2(1, 2)
                _answer(control, problem=problem)
            elif "log" in request:
                printed = os.pread(1, LOG_LIMIT, 0)
                _point_to(request["log"], 1)
                os.dup2(1, 2)
                os.write(1, printed)
                _answer(control, problem=problem)
            else:
                with path.of(request["cwd"]):
                    problem = problem or _import(early, request["modules"], request["folder"])
                _answer(control, problem=problem)
            continue
        refusal = problem or _find_problem(request)
        if refusal:
            _answer(gate, problem=refusal)
        elif _fork_away(agent):
            control.close()
            _become_task(request, gate, stdin, agent)
            path.move_to(request["cwd"])
            early.hide(functools.partial(_start_again, request))
            return _make_order(request)
        gate.close()
        if stdin is not None:
            os.close(stdin)


class _RelativePath:
    """The relative entries of PYTHONPATH on sys.path, which Python has made absolute, in the folder where it started.

    The program's own folder may not have been there yet, or this process may serve a later run in another folder.
    """

    def __init__(self) -> None:
        here = os.getcwd()
        entries = os.environ.get("PYTHONPATH", "")
        relative = [entry for entry in entries.split(os.pathsep) if not os.path.isabs(entry)] if entries else []
        # In the root folder, Python makes "//src" of "src", but "/" of ".".
        self._entries = {
            os.path.abspath(made): entry
            for entry in relative
            for made in (os.path.join(here, entry), f"{here}/{entry}")
        }

    def move_to(self, folder: str) -> None:
        """Replaces the entries with those of a Python that is started in this folder."""
        moved = {old: os.path.abspath(os.path.join(folder, entry)) for old, entry in self._entries.items()}
        sys.path[:] = [moved.get(entry, entry) for entry in sys.path]

    @contextlib.contextmanager
    def of(self, folder: Optional[str]) -> Iterator[None]:
        """Replaces the entries for a while, unless the folder is not known."""
        before = sys.path[:]
        if folder is not None:
            self.move_to(folder)
        try:
            yield
        finally:
            sys.path[:] = before


def _import(early: EarlyImport, modules: Sequence[str], folder: Optional[str]) -> str:
    """Imports the modules, with the folder first on sys.path; returns why nothing may be forked, or an empty string."""
    before = sys.path[:]
    gc.disable()  # an import makes many objects and little garbage: it is a fifth faster without the collector
    try:
        for library in (NUMPY, SCIPY) if KERAS in modules else (NUMPY,):  # with JAX, Keras imports both
            with contextlib.suppress(ImportError):
                early.load(library)  # its BLAS library starts threads, but survives a fork
        threads = _count_threads()
        sys.path[:0] = [] if folder is None else [folder]
        for module in modules:
            early.load(module)
    except BaseException as error:  # noqa: BLE001 - an import may raise anything; the tasks will report it themselves
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        sys.path[:] = before
        early.find_modules()
        linecache.clearcache()  # here, because the memory that a task frees would be copied first
        gc.freeze()  # memory that the collector never touches stays shared with the tasks
        gc.enable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise each task would print the buffered text again
    if _has_backend():
        return "an import has started JAX's backend, whose threads a fork would lose"
    if threading.active_count() > 1 or _count_threads() > threads + IMPORT_THREADS:
        return "an import has started threads, which a fork would lose"
    if any(name.startswith("/dev/nvidia") for name in kernel.open_files(os.getpid()).values()):
        return "an import has initialised CUDA, which does not survive a fork"
    return ""


def _has_backend() -> bool:
    """Whether an import has run JAX."""
    is_initialized = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _explain_foreign() -> str:
    """Why these imports cannot be kept: a module may be the program's own; empty if they can be kept."""
    foreign = find_foreign()
    return f"{foreign} was imported early, but is not part of an installed package" if foreign else ""


def _make_order(request: dict[str, Any]) -> TaskOrder:
    order = dict(request["order"])
    program = Program(**order.pop("program"))
    injections = [Injection(**injection) for injection in order.pop("injections")]
    return TaskOrder(program, injections=injections, **order)


def _start_again(request: dict[str, Any], why: str) -> NoReturn:
    """Called in a task: replaces the process with plain Python, which runs the program from its beginning."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have replaced the stream
            stream.flush()
    order = {**request["order"], "not_forked": why}
    file = request["order_file"]
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(order, stream)
    os.chdir(request["cwd"])
    os.execve(sys.executable, [sys.executable, PACKAGE, "task", file], request["env"])  # noqa: S606 - there is no shell


def _find_problem(request: dict[str, Any]) -> str:
    """Why a plain start would import a different module than this process has imported; empty if it would not."""
    folder = folder_of(Program(**request["order"]["program"]), request["cwd"])
    # worker_entry itself does not count: a plain start also imports it before the program's folder is searched.
    ours = {name.partition(".")[0] for name in sys.modules} - {"__main__", __name__.partition(".")[0]}
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            name = entry.name.partition(".")[0]
            is_module = entry.name.endswith((".py", ".so")) or os.path.exists(os.path.join(entry.path, "__init__.py"))
            if name in ours and is_module and not _is_at(sys.modules.get(name), entry.path):
                return f"{entry.path} shadows a module that is imported already"
    return ""


def _is_at(module: Any, path: str) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith(path)


def _fork_away(agent: int) -> bool:
    """Forks a child of the agent; returns True in the new process and False in the forkserver."""
    intermediate = os.fork()
    if intermediate:
        os.waitpid(intermediate, 0)
        return False
    intermediate = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == intermediate:
        time.sleep(0.0002)
    if os.getppid() != agent:  # the agent has ended, and another process has adopted this one
        os._exit(1)
    return True


def _become_task(request: dict[str, Any], gate: socket.socket, stdin: Optional[int], agent: int) -> None:
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL, agent)
    try:
        if stdin is not None:
            os.dup2(stdin, 0)
            os.close(stdin)
        _point_to(request["log"], 1)
        os.dup2(1, 2)
        os.chdir(request["cwd"])
        # /proc still shows the forkserver's variables, maybe of an earlier run; `clean` finds the task by its run id.
        run_id = request["env"].get(environment.RUN_ID)
        if run_id and not overwrite(environment.RUN_ID, run_id, room=environment.ROOM):
            _answer(gate, problem=NO_NAME)
            os._exit(1)
        gate.sendall(b"%d\n" % os.getpid())
        if gate.recv(len(GO)) != GO:
            os._exit(1)
    except OSError:  # the agent has given up; if not, it notices that the task does not answer
        os._exit(1)
    gate.close()
    os.environ.clear()
    os.environ.update(request["env"])
    clock.follow_environ()
    _renew_modules()


def _renew_modules() -> None:
    """Gives modules that were imported before the fork the state that they would have in a new process."""
    time.tzset()
    main: Any = threading.main_thread()
    if hasattr(main, "_set_native_id"):  # from Python 3.13, the fork does this
        main._set_native_id()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # `random` reseeds itself after a fork
    if "logging" in sys.modules:
        began = time.time() if sys.version_info < (3, 13) else time.time_ns()
        sys.modules["logging"].__dict__["_startTime"] = began
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.__dict__["ORIGINAL_DIR"] = os.path.abspath(os.getcwd())
        process.current_process().authkey = os.urandom(32)


def _receive(control: socket.socket) -> Optional[tuple[dict[str, Any], Optional[socket.socket], Optional[int]]]:
    """The next message with the socket for its answer, and a task's stdin; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, 2)
    if not data:
        return None
    gate, stdin = [*descriptors, None, None][:2]
    return json.loads(data), None if gate is None else socket.socket(fileno=gate), stdin


def _answer(to: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(OSError):  # the agent is gone, or has given up
        to.sendall(json.dumps(answer).encode() + b"\n")


def _point_to(path: str, descriptor: int) -> None:
    flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, descriptor)
    if opened != descriptor:
        os.close(opened)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))
