"""The first process of a container: starts the program, passes signals on, and reports how it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Optional

from worker_entry.agent.tasks.status_reader import StatusFiles
from worker_entry.pod.outcome import End, find_status, render_message
from worker_entry.program.finding import find_command
from worker_entry.protocol import environment
from worker_entry.protocol.child_order import make_child_env
from worker_entry.protocol.file_names import PACKAGE, AttemptFiles, make_private_directory
from worker_entry.protocol.pod_statuses import USAGE, for_tfjob
from worker_entry.protocol.values import HAS_JOINED, Program, TaskExit, TaskOrder

TERMINATION_LOG = "/dev/termination-log"
"""Where Kubernetes looks for a container's last message."""
FLAGS = ("--no-keras-patch", "--no-progress", "--keep-own-tf-config", "--tfjob")
SYNC, START_TIMEOUT, STOP_GRACE, LOG = "--sync", "--start-timeout", "--stop-grace", "--termination-log"
VALUES = {SYNC: 2, START_TIMEOUT: 1, STOP_GRACE: 1, LOG: 1}
_USAGE = (
    "usage: python -m worker_entry pod [--sync ZIP FOLDER] [--start-timeout S] [--stop-grace S] "
    "[--termination-log FILE] [--no-keras-patch] [--no-progress] [--keep-own-tf-config] [--tfjob] "
    "(SCRIPT | -m MODULE | -- COMMAND) [ARGS…]"
)
_TAIL_LINES = 200
_DRAIN_S = 2.0
"""How long to wait for the last output; a process that the program leaves behind may hold the pipe open."""
_POLL_S = 1.0
_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Options:
    """The options on the command line; `synced` is a zip and the folder in which to unpack it."""

    program: Program
    flags: frozenset[str] = frozenset()
    synced: Optional[tuple[str, str]] = None
    start_s: float = 0.0
    grace_s: float = math.inf
    log: str = TERMINATION_LOG


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line; exits with status 2 if it is invalid."""
    rest, flags, values = list(arguments), set(), {}
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name = rest.pop(0)
        if name in FLAGS:
            flags.add(name)
        elif name in VALUES and len(rest) > VALUES[name]:
            values[name] = [rest.pop(0) for _ in range(VALUES[name])]
        else:
            _refuse()
    kind = {"-m": "module", "--": "command"}.get(rest[0] if rest else "", "script")
    if kind != "script":
        del rest[0]
    if not rest:
        _refuse()
    synced = values.get(SYNC)
    return Options(
        program=Program(kind=kind, target=rest[0], args=rest[1:]),
        flags=frozenset(flags),
        synced=None if synced is None else (synced[0], synced[1]),
        start_s=float(values.get(START_TIMEOUT, ["0"])[0]),
        grace_s=float(values.get(STOP_GRACE, ["inf"])[0]),
        log=values.get(LOG, [TERMINATION_LOG])[0],
    )


def _refuse() -> None:
    sys.stderr.write(f"{_USAGE}\n")
    sys.exit(USAGE)


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns the exit status of the container."""
    options = parse(arguments)
    task = os.environ.get(environment.TASK, "worker:0")
    env = dict(os.environ)
    restarts = env.pop(environment.RESTARTS, "")
    env[environment.ATTEMPT] = str(int(restarts) + 1 if restarts.isdigit() else 1)
    if options.synced is not None:
        archive, folder = options.synced
        _unpack(archive, folder)
        os.chdir(folder)
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        files = AttemptFiles(folder, 1)
        make_private_directory(files.directory)
        end = _run(options, task, files, env)
    status = find_status(end)
    status = for_tfjob(status) if "--tfjob" in options.flags else status
    message = render_message(task, end, find_status(end))
    with contextlib.suppress(OSError), open(options.log, "wb") as stream:
        stream.write(message)
    with contextlib.suppress(OSError):
        os.write(2, b"distlaunch: " + message)
    return status


def _unpack(archive: str, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    with zipfile.ZipFile(archive) as bundle:
        for entry in bundle.infolist():
            path = bundle.extract(entry, folder)
            os.chmod(path, entry.external_attr >> 16 & 0o777)


def _run(options: Options, task: str, files: AttemptFiles, env: dict[str, str]) -> End:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        process = _start(options, task, files, env, before)
    except OSError as error:
        tail = [f"{options.program.target}: {error.strerror}"]
        return End(TaskExit(code=USAGE), tail=tail)
    output = _Output(process)
    reader = StatusFiles(files, task)
    forms = environment.TF_CONFIG in env or environment.JAX_COORDINATOR in env
    deadline = time.monotonic() + options.start_s if options.start_s and forms else None
    kill_at = math.inf
    asked = late = False
    status: Optional[int] = None
    while status is None:
        received = signal.sigtimedwait(_WAITED_FOR, _POLL_S)
        if received is not None and received.si_signo != signal.SIGCHLD:
            asked = True
            kill_at = min(kill_at, time.monotonic() + options.grace_s)
            _signal_group(process.pid, received.si_signo)
        if time.monotonic() > kill_at:  # TensorFlow ignores SIGTERM; a pod that Kubernetes kills cannot say why it ends
            kill_at = math.inf
            _signal_group(process.pid, signal.SIGKILL)
        if deadline is not None:
            if _has_met(reader, uses_jax=environment.JAX_COORDINATOR in env):
                deadline = None
            elif time.monotonic() > deadline:
                late, deadline = True, None
                _signal_group(process.pid, signal.SIGKILL)
        status = _reap(process.pid)
    _signal_group(process.pid, signal.SIGKILL)  # processes left behind, which would end with the container
    output.drain()
    finished = os.path.exists(files.finished(task))
    reader.forget_last()
    last = reader.read_changed()
    crash = reader.load_crash(time.time())
    process.returncode = 0  # `_reap` has waited for it
    return End(
        TaskExit.from_wait_status(status),
        crash=crash,
        tail=output.lines(),
        asked=asked,
        late=options.start_s if late else 0.0,
        finished=finished,
        step=last.progress.step if last is not None and last.progress is not None else None,
        saves=last is not None and last.saves_when_preempted,
    )


def _start(
    options: Options, task: str, files: AttemptFiles, env: dict[str, str], mask: Iterable[int]
) -> subprocess.Popen[bytes]:
    flags = options.flags
    order = TaskOrder(
        options.program,
        crash_file=files.crash(task),
        finished_file=files.finished(task),
        status_file=files.status(task),
        stacks_file=files.stacks(task),
        child_file=files.child(task),
        child_crash_file=files.child_crash(task),
        patch_keras="--no-keras-patch" not in flags,
        progress="--no-progress" not in flags,
        keep_own_tf_config="--keep-own-tf-config" in flags,
    )
    program = options.program
    if program.kind == "command":
        argv = [find_command(program.target, env, os.getcwd()) or program.target, *program.args]
        env = make_child_env(order, env, starter=os.getpid())
    else:
        with open(files.order(task), "w", encoding="utf-8") as stream:
            json.dump(asdict(order), stream)
        argv = [sys.executable, PACKAGE, "task", files.order(task)]
    return subprocess.Popen(
        argv,
        env=env,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a signal reaches all that the program has started
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask) and None,
    )


def _reap(pid: int) -> Optional[int]:
    """The wait status of that child, once it has ended; the orphans of a container are children of this process too."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == 0:
            return None
        if ended == pid:
            return status


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def _has_met(reader: StatusFiles, *, uses_jax: bool) -> bool:
    """Whether the program has met its peers: it has built a strategy or joined JAX's cluster, or it trains."""
    status = reader.read_changed()
    if status is None:
        return False
    # Under JAX, a program reports its strategy before it waits for its peers.
    return status.progress is not None or (status.phase == HAS_JOINED if uses_jax else bool(status.strategy))


@dataclass
class _Output:
    """Forwards the program's stderr and keeps its end, the only record of what TensorFlow reports when it aborts."""

    process: subprocess.Popen[bytes]
    _kept: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def drain(self) -> None:
        self._thread.join(_DRAIN_S)

    def lines(self) -> list[str]:
        return [line.decode(errors="replace") for line in [*self._kept, self._rest] if line.strip()]

    def _pass_on(self) -> None:
        assert self.process.stderr is not None
        descriptor = self.process.stderr.fileno()
        while True:
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            *lines, rest = (self._rest + data).split(b"\n")
            self._kept.extend(lines)
            self._rest = rest[-(1 << 16) :]
            _write_all(2, data)


def _write_all(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
