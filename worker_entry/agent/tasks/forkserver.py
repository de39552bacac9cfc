"""An agent's side of its forkserver: decides when there is one, and which tasks cannot be forked from it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from worker_entry.agent.tasks.warm_forkserver import WarmForkserver, find_difference
from worker_entry.program.compile_cache import add_compile_cache
from worker_entry.program.finding import folder_of, may_import
from worker_entry.program.import_variables import ProgramEnv
from worker_entry.program.libraries import TENSORFLOW, Libraries, libraries_of
from worker_entry.protocol import environment
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.node_local import GO
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program, TaskOrder, TaskStatus
from worker_entry.system import kernel, processes

LOG = "forkserver.log"
IMPORT_S = 120.0
"""The agent stops waiting for an import that takes longer."""
FORK_S = 5.0
"""A forkserver that takes longer to fork is given up: the agent does nothing else while it waits."""
KEEP_S = 5.0
"""A forkserver that takes longer to say whether it can be kept is not kept."""


class ForkserverError(Exception):
    """A task cannot be forked; the message is for the user."""


class ForkserverClient:
    """Runs at most one forkserver at a time. `pids` contains it, so that others can exempt it from a stop."""

    def __init__(self, selector: selectors.BaseSelector, kept: Optional[WarmForkserver] = None, news: str = "") -> None:
        self.pids: set[int] = set() if kept is None else {kept.pid}
        self.problem = ""
        """Why nothing is forked; empty if nothing prevents it."""
        self._selector = selector
        self._control: Optional[socket.socket] = None
        self._env: dict[str, str] = {}
        """The import's environment: what all tasks have in common, and what the program will have set by then."""
        self._program_env = ProgramEnv()
        self._unanswered = 0
        """Imports that were requested and have not finished."""
        self._modules: list[str] = []
        """Modules to import once the program is in its folder."""
        self._asked: frozenset[str] = frozenset()
        """Modules that the present forkserver was asked to import."""
        self._libraries = TENSORFLOW
        self._kept = kept
        """A forkserver of an earlier run, until this one uses or ends it."""
        self._reads: Optional[frozenset[str]] = None
        """The variables that its imports have read, if that is known; None: they may have read any."""
        self._renews = False
        """Whether the earlier run's forkserver has yet to answer whether it can be used."""
        self.news = news
        """Why an earlier run's forkserver is not used."""
        self._news_of_agent = news
        """The same if it was the earlier run's agent that cannot be used: few users know their control group."""
        self._deadline = 0.0
        self._order: Optional[Preload] = None
        self._cwd = self._directory = ""
        self._is_early = False
        """Whether the forkserver was started before its run was known, and may not suit it."""

    @property
    def wanted(self) -> bool:
        return self._order is not None and kernel.LINUX

    @property
    def library(self) -> str:
        """The name of what is imported early, for the user."""
        return self._libraries.name

    def settled(self, now: float) -> bool:
        """Whether there is nothing more to wait for; `now` is in monotonic seconds."""
        if self._control is not None and self._unanswered and now > self._deadline:
            self._fail(f"the import of {self.library} has taken more than {IMPORT_S:g} s")
        return self._control is None or not self._unanswered

    def begin(self, order: Preload, cwd: str, directory: str) -> None:
        """Starts the forkserver, if none is running and the program needs one.

        Args:
            order: the order to preload.
            cwd: the folder in which the program will run.
            directory: the folder of the forkserver's log; empty: there is no run yet, and the order may change.
        """
        if self._kept is not None and not directory:
            return  # its imports are done
        early = (self._order, self._cwd, self._env) if self._is_early else None
        self._libraries = libraries_of(order.framework)
        packages = self._libraries.packages
        if not may_import(order.program, cwd, packages):
            self.end_early()
            return
        self._order, self._cwd, self._directory = order, cwd, directory
        log = os.path.join(directory, LOG)
        if not self.wanted or (self._control is not None and self.pids and not self._is_early):
            return
        env = environment.merge(os.environ, order.env, order.unset, order.defaults)
        with contextlib.suppress(OSError):  # the tasks' start reports it
            add_compile_cache(env)
        from worker_entry.program.environment import find_program_env  # slow: it imports Python's parser

        self._program_env = find_program_env(order.program, cwd, env, packages)
        self.problem = _explain(self._program_env, self._libraries)
        if self.problem:
            self.end_early()
            return
        self._env = self._program_env.over(env)
        if self._kept is not None and self._renew(self._kept, order, log):
            return
        if early is not None and self._suits(*early):
            self._is_early, self._modules = False, list(order.modules)
            self._ask({"log": log})
            return
        self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if directory else os.memfd_create(LOG)
        run_id, room = self._env.get(environment.RUN_ID, ""), "-" * environment.ROOM_LENGTH
        try:
            with theirs:
                pid = processes.spawn(
                    [sys.executable, PACKAGE, "forkserver"],
                    env={environment.RUN_ID: run_id, environment.ROOM: room, **self._env},
                    cwd=cwd if os.path.isdir(cwd) else os.sep,
                    output=output,
                    stdin=theirs.fileno(),
                )
        except (OSError, ValueError) as error:  # a null byte in the environment
            ours.close()
            self.problem = f"the forkserver cannot be started: {getattr(error, 'strerror', error)}"
            return
        finally:
            os.close(output)
        self.pids.add(pid)
        self._is_early = not directory
        self._use(ours, order)
        self._ask_for(self._libraries.find_modules(order.program, cwd))

    def _renew(self, kept: WarmForkserver, order: Preload, log: str) -> bool:
        """Uses an earlier run's forkserver; returns False if its environment or modules differ from this run's."""
        self.news = kept.explain_difference(self._env, order.framework, list(order.modules))
        if self.news:
            return False
        self._kept, self._reads, self._env = None, kept.reads, kept.env
        self._use(kept.control, order)
        self._asked = kept.imported
        self._ask({"renew": log})
        self._renews = True
        return True

    def _suits(self, order: Optional[Preload], cwd: str, env: Mapping[str, str]) -> bool:
        """Whether an import that was begun like this is the one that the present order asks for."""
        now = self._order
        assert now is not None
        if order is None or (order.program, order.framework, cwd) != (now.program, now.framework, self._cwd):
            return False
        return find_difference(env, self._env) is None

    def _use(self, control: socket.socket, order: Preload) -> None:
        self._control, self._modules, self._asked = control, list(order.modules), frozenset()
        self._selector.register(control, selectors.EVENT_READ, self._read_answer)

    def keep(self) -> tuple[Optional[WarmForkserver], str]:
        """Detaches the forkserver for a later run; otherwise returns the reason, if the user should know it."""
        order, control = self._order, self._control
        if order is None or control is None or self._unanswered or self._modules:
            return None, self.problem
        control.settimeout(KEEP_S)
        try:
            control.sendall(json.dumps({"keep": True}).encode())
            answer = json.loads(control.recv(1 << 16))
            control.settimeout(None)
        except (OSError, ValueError) as error:
            answer = {"problem": f"the forkserver does not answer: {error}"}
        if answer["problem"]:
            return None, answer["problem"]
        self._selector.unregister(control)
        self._control = None
        [pid] = self.pids
        self.pids.clear()
        reads = frozenset(answer["reads"])
        kept = WarmForkserver(pid, control, self._env, order.framework, list(order.modules), self._asked, reads)
        return kept, ""

    def expect(self, program: Program, cwd: str) -> None:
        """Called when the program is in place and about to be started: imports what was not imported before."""
        packages = self._libraries.packages
        if not may_import(program, cwd, packages):
            self.dismiss()
        if self._control is None:
            return
        from worker_entry.program.environment import find_program_env

        env = {name: value for name, value in self._env.items() if name not in self._program_env.changes}
        found = find_program_env(program, cwd, env, packages)
        if found.changes != self._program_env.changes or found.unclear:
            changed = f"the program no longer sets the variables with which {self.library} was imported"
            self._fail(_explain(found, self._libraries) or changed)
            return
        wanted, self._modules = [*self._libraries.find_modules(program, cwd), *self._modules], []
        missing = [module for module in wanted if module not in self._asked]
        if missing:
            self._ask_for(missing, folder_of(program, cwd), cwd)

    def fork(
        self,
        order: TaskOrder,
        env: Mapping[str, str],
        cwd: str,
        log: str,
        order_file: str,
        stdin: Optional[int] = None,
    ) -> int:
        """Forks the task; returns the pid of its process, a child of this one.

        Args:
            order: what it runs.
            env: its environment.
            cwd: its working directory.
            log: the file for its output.
            order_file: where the order is written if the task has to start again as plain Python.
            stdin: the descriptor from which it reads; None: it reads nothing.

        Raises:
            ForkserverError: the task cannot be forked; the message says why, and is empty if no fork was expected.
        """
        if not self.wanted:
            raise ForkserverError("")
        if self._control is None or self._unanswered:
            raise ForkserverError(self.problem or f"{self.library} is not imported yet")
        different = find_difference(self._env, self._program_env.over(dict(env)), self._reads)
        if different is not None:
            raise ForkserverError(f"{different} differs from its value when {self.library} was imported")
        request = {"order": asdict(order), "env": dict(env), "cwd": cwd, "log": log, "order_file": order_file}
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with gate:
            gate.settimeout(FORK_S)
            try:
                with theirs:
                    data = json.dumps(request).encode()
                    self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
                    socket.send_fds(self._control, [data], [theirs.fileno(), *([stdin] if stdin is not None else [])])
                answer = gate.recv(4096)
                if answer[:1].isdigit():
                    gate.sendall(GO)
                    return int(answer)
            except OSError as error:
                self._fail(f"the forkserver does not answer: {error}")
                raise ForkserverError(self.problem) from None
        if not answer:
            raise ForkserverError("the forkserver did not fork")
        raise ForkserverError(json.loads(answer)["problem"])

    def take_news(self) -> Iterator[tuple[str, bool]]:
        """Yields, once, why the import is done again if the program needs it, and whether this is only a detail."""
        if self.news and self.wanted:
            news, self.news = self.news, ""
            yield news, news == self._news_of_agent

    def is_refused(self, status: TaskStatus) -> bool:
        """Whether a task reports for the first time that it cannot use an early import; then ends the forkserver."""
        is_relevant = bool(status.not_forked) and self.wanted
        if is_relevant:
            self.dismiss(status.not_forked)
        return is_relevant

    def release_unless_kept(self) -> None:
        """Ends the forkserver after all tasks have been forked, unless tasks may be started again."""
        if self._order is not None and not self._order.keep:
            self.dismiss()

    def dismiss(self, problem: str = "") -> None:
        """Ends the forkserver for good; `problem` says why, if the user should know."""
        self._fail(problem)
        self._order = None

    def revive(self) -> None:
        """Starts the forkserver again if it has died."""
        if self._order is not None and not self.pids and not self.problem:
            self.begin(self._order, self._cwd, self._directory)

    def end_early(self) -> None:
        """Ends a forkserver that does not suit its run."""
        if self._is_early:
            self.end()

    def end(self) -> None:
        """Kills the forkserver and waits until it is gone."""
        processes.end_children(self.pids)
        self._forget()

    def _read_answer(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(4096)
        except OSError:
            data = b""
        if not data:
            # Without a problem, `revive` starts it again for the next attempt: it has done its imports before.
            self._fail("" if not self._unanswered else "the forkserver has exited")
        elif (problem := json.loads(data)["problem"]) and self._renews:
            self.news = problem
            self.end()
            self.revive()
        elif problem:
            self._fail(problem)
        else:
            self._renews = False
            self._unanswered -= 1

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.end()

    def _forget(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        self._control, self._unanswered, self._modules = None, 0, []
        self._kept = self._reads = None
        self._renews = self._is_early = False

    def _ask_for(self, modules: list[str], folder: Optional[str] = None, cwd: Optional[str] = None) -> None:
        self._asked |= {*modules}
        self._ask({"modules": modules, "folder": folder, "cwd": cwd})

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._control is not None
        self._unanswered += 1
        self._deadline = time.monotonic() + IMPORT_S
        with contextlib.suppress(OSError):  # it has exited, which `_read_answer` notices
            self._control.sendall(json.dumps(request).encode())


def _explain(found: ProgramEnv, libraries: Libraries) -> str:
    """Why nothing is imported early: the program may set a variable whose value cannot be known before it runs."""
    for name, place in sorted(found.unclear.items()):
        return f"{place} may set {name}, which the import of {libraries.name} reads"
    return ""
