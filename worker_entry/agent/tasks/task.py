"""One task of an agent: starts its process, and reads its log, its status and its crash record."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Optional, Union

from worker_entry.agent.tasks.forkserver import ForkserverClient, ForkserverError
from worker_entry.agent.tasks.input import TaskInput
from worker_entry.agent.tasks.log import TaskLog
from worker_entry.agent.tasks.status_reader import StatusFiles
from worker_entry.program.compile_cache import add_compile_cache
from worker_entry.program.finding import find_command
from worker_entry.protocol import environment
from worker_entry.protocol.addresses import split_address
from worker_entry.protocol.child_order import make_child_env
from worker_entry.protocol.file_names import PACKAGE, AttemptFiles, make_private_directory
from worker_entry.protocol.frozen import asdict, replace
from worker_entry.protocol.messages import Exited, Halted, InterruptTaken, Returned, Started, Status
from worker_entry.protocol.values import Problem, TaskExit, TaskOrder, TaskStart
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.memory import OomWatch

FULL = 64 << 10
"""Bytes; a disk with less free space counts as full: there may be no room for a log's next lines."""

FREE_SPACE = "free some space or use another --run-dir"

Cluster = dict[str, list[str]]
"""TF_CONFIG's addresses by task type."""


class TaskStartError(Exception):
    """A task could not be started; `problem` has the reason and a hint."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class StartedTask:
    """One started task: its process and its log."""

    def __init__(
        self,
        start: TaskStart,
        pid: int,
        log: TaskLog,
        files: AttemptFiles,
        not_forked: str = "",
        own_input: Optional[TaskInput] = None,
        *,
        kernel: Kernel,
    ) -> None:
        self._kernel = kernel
        self.name = start.task
        self.pid = pid
        self.running = True
        self.started = Started(self.name, pid, kernel.now())
        self.halted: Optional[Halted] = None
        """The last signal that suspended or continued it, as reported to the controller."""
        self.returned: Optional[Returned] = None
        """How its program ended, as reported to the controller."""
        self.ended: Optional[Exited] = None
        """How it ended, as reported to the controller."""
        self.takes_interrupt = False
        """Whether InterruptTaken was sent to the controller."""
        self.not_forked = not_forked
        """Why it was not forked from the forkserver, if it could have been."""
        self.log = log
        self.input = own_input
        """The pipe to its stdin; None if its stdin is empty."""
        self._files = files
        self.is_watched = start.program.kind != "command"
        self._status = StatusFiles(files, start.task)

    @classmethod
    def start(
        cls,
        start: TaskStart,
        cluster: Cluster,
        files: AttemptFiles,
        cwd: str,
        forkserver: ForkserverClient,
        make_input: Callable[[str], TaskInput],
        kernel: Kernel,
    ) -> StartedTask:
        """Starts the task in the folder `cwd`.

        Raises:
            TaskStartError: the task could not be started.
        """
        own_input: Optional[TaskInput] = None
        try:
            own_input = make_input(start.task) if start.stdin else None
            return cls._start(start, _environment(start, cluster), files, cwd, forkserver, own_input, kernel)
        except (OSError, ValueError) as error:
            if own_input is not None:
                own_input.close()
            raise TaskStartError(_find_problem(start, error)) from error

    @classmethod
    def _start(
        cls,
        start: TaskStart,
        env: dict[str, str],
        files: AttemptFiles,
        cwd: str,
        forkserver: ForkserverClient,
        own_input: Optional[TaskInput],
        kernel: Kernel,
    ) -> StartedTask:
        make_private_directory(files.directory)
        # The process writes to the log itself: a slow reader never blocks training, and both streams keep their order.
        log = files.log(start.task)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        not_forked = ""
        stdin = own_input.reader if own_input is not None else None
        try:
            if start.program.kind == "command":
                program = start.program
                argv = [find_command(program.target, env, cwd) or program.target, *program.args]
                env = make_child_env(_make_order(start, files), env, starter=os.getpid())
                pid = kernel.spawn(argv, env=env, cwd=cwd, output=output, stdin=stdin)
            else:
                order = _make_order(start, files)
                try:
                    pid = forkserver.fork(
                        order, env, cwd, os.path.abspath(log), os.path.abspath(files.order(start.task)), stdin
                    )
                except ForkserverError as error:
                    not_forked = str(error)
                    pid = _start_runner(order, files.order(start.task), env, cwd, output, stdin, kernel)
        finally:
            os.close(output)
        if own_input is not None:
            own_input.begin()
        task_log = TaskLog(log, files.log_index(start.task), kernel.now)
        return cls(start, pid, task_log, files, not_forked, own_input, kernel=kernel)

    def follow(self, before: StartedTask) -> None:
        """Takes over the log of the task's earlier process, to which this one appends."""
        self.log.close()
        self.log = before.log
        self.started = replace(self.started, start=before.started.start + 1)

    @property
    def stacks_file(self) -> str:
        return self._files.stacks(self.name)

    @property
    def has_handler(self) -> bool:
        """Whether the task's program, if it `is_watched`, may handle SIGTERM."""
        return os.path.exists(self._files.handler(self.name))

    def new_interrupt(self) -> Iterator[InterruptTaken]:
        """Reports once that the program reacts to SIGINT; a command is assumed to."""
        if not self.takes_interrupt and (not self.is_watched or os.path.exists(self._files.interrupted(self.name))):
            self.takes_interrupt = True
            yield InterruptTaken(self.name)

    def new_status(self) -> Iterator[Status]:
        """The program's status, if it has changed."""
        status = self._status.read_changed()
        if status is not None:
            yield Status(self.name, status)

    def status_again(self) -> Iterator[Status]:
        """The program's status, whether or not it has changed."""
        self._status.forget_last()
        yield from self.new_status()

    def new_return(self) -> Iterator[Returned]:
        """The end of its program, if that is news; the process may stay: it waits for its peers, or for a child."""
        if self.returned is not None or not self.is_watched:
            return
        time, crash = self._find_finished(), None
        if time is None:
            crash = self._status.load_own_crash()
            if crash is None or crash.thread is not None:
                return
            time = crash.time
        self.returned = Returned(self.name, time, crash, self.started.start)
        yield self.returned

    def _find_finished(self) -> Optional[float]:
        """When the program ended without a failure; None if it did not."""
        finished = None
        with contextlib.suppress(OSError):
            finished = os.stat(self._files.finished(self.name)).st_mtime
            with contextlib.suppress(ValueError), open(self._files.finished(self.name), encoding="ascii") as stream:
                finished = float(stream.read(64))
        return finished

    def report_end(self, how: TaskExit, time: float, oom: OomWatch, stopped: Optional[float]) -> Exited:
        """The task's end, with everything that this node and the task's own files know about it.

        `stopped`: when the agent began to stop it.
        """
        start, finished = self.started.start, self._find_finished()
        before_stop = stopped is None or (finished is not None and finished < stopped)
        if how.ok:
            return Exited(self.name, how, time, finished=finished, start=start, before_stop=before_stop)
        evidence = oom.find(self.pid, how, self._kernel.monotonic()) or self._find_full()
        crash = self._status.load_crash(time)
        return Exited(self.name, how, time, crash, finished, evidence, start, before_stop)

    def _find_full(self) -> Optional[Problem]:
        folder = self._files.directory
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < FULL:
            return Problem("disk-full", f"{os.strerror(errno.ENOSPC)}: {folder}", FREE_SPACE)
        return None

    def close(self) -> None:
        self.log.close()
        if self.input is not None:
            self.input.close()


def _make_order(start: TaskStart, files: AttemptFiles) -> TaskOrder:
    return TaskOrder(
        start.program,
        crash_file=files.crash(start.task),
        finished_file=files.finished(start.task),
        status_file=files.status(start.task),
        stacks_file=files.stacks(start.task),
        handler_file=files.handler(start.task),
        interrupted_file=files.interrupted(start.task),
        child_file=files.child(start.task),
        child_crash_file=files.child_crash(start.task),
        patch_keras=start.patch_keras,
        coordination_timeout_s=start.coordination_timeout_s,
        progress=start.progress,
        injections=start.injections,
        keep_own_tf_config=start.keep_own_tf_config,
    )


def _start_runner(
    order: TaskOrder, file: str, env: dict[str, str], cwd: str, output: int, stdin: Optional[int], kernel: Kernel
) -> int:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(asdict(order), stream)
    return kernel.spawn([sys.executable, PACKAGE, "task", file], env=env, cwd=cwd, output=output, stdin=stdin)


def _find_problem(start: TaskStart, error: Union[OSError, ValueError]) -> Problem:
    if isinstance(error, ValueError):
        return Problem("start-failed", f"its arguments or environment are not valid: {error}", "", start.task)
    if error.errno == errno.E2BIG:
        message, hint = (
            "its arguments and environment are too long for this system",
            "shorten `env` or the arguments",
        )
    elif error.errno == errno.ENOSPC:
        message, hint = "the disk of the run directory is full", FREE_SPACE
    elif error.errno == errno.EAGAIN:
        message, hint = (
            "no more processes can be started there",
            "raise the limit (`ulimit -u`, or `pids.max` of the container) or stop processes that are not needed",
        )
    elif error.errno == errno.ENOEXEC:
        message, hint = f"{start.program.target} is neither a binary nor a script with a #! line", "add a #! line"
    else:
        message, hint = f"{error.strerror}: {error.filename or start.program.target}", ""
    return Problem("start-failed", message, hint, start.task)


def _find_peers(start: TaskStart, env: dict[str, str]) -> Iterator[str]:
    """The addresses to which the task's framework connects by gRPC."""
    if start.joins or environment.TF_CONFIG in start.env:
        for addresses in json.loads(env[environment.TF_CONFIG])["cluster"].values():
            yield from addresses
    if environment.JAX_COORDINATOR in start.env:
        yield start.env[environment.JAX_COORDINATOR]


def _environment(start: TaskStart, cluster: Cluster) -> dict[str, str]:
    env = environment.merge(os.environ, start.env, start.unset, start.defaults)
    if start.joins:
        task_type, _, index = start.task.partition(":")
        config = {"cluster": cluster, "task": {"type": task_type, "index": int(index)}}
        env["TF_CONFIG"] = json.dumps(config, separators=(",", ":"))
    # gRPC sends worker-to-worker traffic through a proxy unless `no_grpc_proxy` excludes the hosts.
    if any(env.get(name) for name in environment.PROXIES):
        hosts = {split_address(address)[0] for address in _find_peers(start, env)}
        if hosts:
            known = env.get("no_grpc_proxy") or env.get("no_proxy") or ""
            env["no_grpc_proxy"] = ",".join([*filter(None, known.split(",")), *sorted(hosts)])
    add_compile_cache(env)
    return env
