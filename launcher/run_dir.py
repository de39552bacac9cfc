"""The files of a run, all named here. The folder is private to the user; files appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import re
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.controller import Controller, is_alive, parse_controller, send_signal, this_process
from launcher.errors import RunDirectoryError, UsageError
from launcher.interrupts import STACKS_SIGNAL
from launcher.log_lines import LogLines
from launcher.tasks import TaskId
from worker_entry.holes import last_data
from worker_entry.run_files import AttemptFiles, make_private_directory

HEAD_BYTES = 1 << 20
"""How much of a log's beginning is looked at while the cluster forms."""
TAIL_BYTES = 16 << 10
"""How much of a log's end is looked at for its last lines."""

_ZEROS = re.compile(rb"\0{16,}")
"""What is left where a program has cut its log to a greater length."""


def make_run_id(name: str) -> str:
    """`20261121-143005-two-nodes-3f9a`: sorts by time, tells runs of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(2)}"


def runs_directory(environ: Mapping[str, str]) -> Path:
    """Where runs go that are told no place: `runs` in distlaunch's part of the user's state directory.

    Raises:
        RunDirectoryError: the user has none, nor a home.
    """
    state = environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:  # a user ID that the system does not know, as in some containers
        raise RunDirectoryError(
            "there is no home directory for the files of runs", cure="set HOME, or name a place with --run-dir"
        ) from None
    return base / "distlaunch" / "runs"


class RunDir:
    """One run's folder. Every method that writes raises RunDirectoryError when it cannot."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan = root / "plan.json"
        self.spec = root / "spec.json"
        self.report = root / "report.json"
        self.stacks = root / "stacks.txt"
        self.agent_errors = root / "agent.stderr"
        self.model = root / "model"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self._run = root / "run.json"

    @classmethod
    def create(cls, root: Path) -> RunDir:
        """Makes the folder, which must not hold anything yet."""
        root = absolute(root)
        if not is_utf_8(root):
            raise RunDirectoryError(
                f"the run directory {os.fsencode(root)!r} is not UTF-8", cure="name another place with --run-dir"
            )
        try:
            make_private_directory(str(root.parent))
            try:
                root.mkdir(mode=0o700)
            except FileExistsError:
                _check_unused(root)
                root.chmod(0o700)
        except OSError as error:
            raise _cannot_write(root, error) from None
        return cls(root)

    @contextlib.contextmanager
    def hold(self, run_id: str) -> Iterator[None]:
        """Within it the run is under way: others see it, and may send this process the signals of `interrupts`."""
        controller = this_process()
        self._write_run(run_id, controller, ended=False)
        try:
            yield
        finally:
            # For other machines, which cannot see whether this process lives. On a full disk it is not written; here
            # the process' end says the same.
            with contextlib.suppress(RunDirectoryError):
                self._write_run(run_id, controller, ended=True)

    def _write_run(self, run_id: str, controller: Controller, *, ended: bool) -> None:
        self.write_json(self._run, {"run_id": run_id, "controller": asdict(controller), "ended": ended})

    def read_run(self) -> tuple[str, Controller | None]:
        """The run's name, and the process that is at work on it, if one is.

        Raises:
            RunDirectoryError: this is no run's folder.
            UsageError: whether that process lives cannot be seen from here.
        """
        run_id, controller, ended = self._read_run()
        return run_id, None if ended or not is_alive(controller) else controller

    def _read_run(self) -> tuple[str, Controller, bool]:
        try:
            facts = json.loads(self._run.read_bytes())
            return str(facts["run_id"]), parse_controller(facts["controller"]), bool(facts["ended"])
        except (OSError, ValueError, KeyError, TypeError):
            raise RunDirectoryError(f"{self.root} is not the folder of a run") from None

    def ask_stacks(self, within_s: float = 15.0) -> str:
        """What all tasks of the run are doing, by its distlaunch.

        Raises:
            UsageError: the run is over, or does not answer.
        """
        run_id, controller = self.read_run()
        before = self._stacks_written()
        if controller is None or not send_signal(controller, STACKS_SIGNAL):
            raise UsageError(f"run {run_id} is over")
        deadline = time.monotonic() + within_s
        while self._stacks_written() == before:
            if not is_alive(controller):
                raise UsageError(f"run {run_id} is over")
            if time.monotonic() > deadline:
                raise UsageError(f"run {run_id} does not say within {within_s:g} s what its tasks are doing")
            time.sleep(0.05)
        return self.stacks.read_text(encoding="utf-8")

    def ask_to_end(self, within_s: float = 120.0) -> bool:
        """Has the run's distlaunch end it, and waits for the end of that process. Returns whether it was under way.

        Raises:
            RunDirectoryError: it has not ended within this time.
            UsageError: it cannot be asked from here.
        """
        run_id, controller = self.read_run()
        if controller is None or not send_signal(controller, signal.SIGTERM):
            return False
        deadline = time.monotonic() + within_s
        while is_alive(controller):
            if time.monotonic() > deadline:
                raise RunDirectoryError(
                    f"run {run_id} has not ended within {within_s:g} s", cure=f"look at its terminal, or at {self.root}"
                )
            time.sleep(0.05)
        return True

    def _stacks_written(self) -> int:
        return self.stacks.stat().st_mtime_ns if self.stacks.exists() else 0

    def write_stacks(self, text: str) -> str:
        """Returns why they cannot be written; empty if they are. A full disk, say, keeps nobody from training."""
        try:
            self.write_text(self.stacks, text)
        except RunDirectoryError as error:
            return error.message
        return ""

    def log(self, attempt: int, task: TaskId) -> Path:
        return Path(AttemptFiles(str(self.root), attempt).log(str(task)))

    def read_log(self, attempt: int, task: TaskId) -> bytes:
        """The beginning of a task's log."""
        try:
            with self.log(attempt, task).open("rb") as file:
                return file.read(HEAD_BYTES)
        except OSError:
            return b""

    def log_size(self, attempt: int, task: TaskId) -> int:
        """Bytes that the log of a task has; 0 if there is none."""
        try:
            return self.log(attempt, task).stat().st_size
        except OSError:
            return 0

    def make_checkpoints(self) -> None:
        """Makes the folder for what programs save to go on from; the same for all attempts."""
        try:
            make_private_directory(str(self.checkpoints))
        except OSError as error:
            raise _cannot_write(self.checkpoints, error) from None

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def write_json(self, path: Path, value: Any) -> None:
        self.write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _cannot_write(path, error) from None


def find_run(what: str) -> RunDir:
    """The run of a folder or a name.

    Raises:
        UsageError: there is none.
    """
    folder = Path(what) if Path(what).is_dir() else runs_directory(os.environ) / what
    if not folder.is_dir():
        raise UsageError(f"there is no run {what}", cure="name a run's folder, as its first line tells it")
    return RunDir(absolute(folder))


def last_lines(path: Path, count: int, *, fold: bool = True) -> list[str]:
    """The last lines of a file that say something, of TensorFlow's only if not `fold`; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            begin, end = last_data(file.fileno())
            file.seek(max(begin, end - TAIL_BYTES))
            data = file.read(min(end - begin, TAIL_BYTES))
    except OSError:
        return []
    log = LogLines(fold=fold)
    lines = [*log.feed(_ZEROS.sub(b"", data.strip(b"\0"))), *log.close()]
    return [line.decode("utf-8", "replace")[:400] for line in lines if line.strip()][-count:]


def current_directory() -> Path:
    """The folder that we are in.

    Raises:
        UsageError: it is gone, or its name cannot be written into our files.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current directory cannot be used: {error.strerror}", cure="change to a directory that exists"
        ) from None
    if not is_utf_8(here):
        raise UsageError(f"the current directory {os.fsencode(here)!r} is not UTF-8", cure="change to another one")
    return here


def absolute(path: Path) -> Path:
    """
    Raises:
        UsageError: the path is relative to a current directory that cannot be used.
    """
    return path if path.is_absolute() else current_directory() / path


def is_utf_8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_unused(root: Path) -> None:
    """
    Raises:
        RunDirectoryError: the folder that was there already is somebody else's, or holds files.
        OSError: it cannot be looked at, or is no folder.
    """
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    owner = root.stat().st_uid
    if owner != os.geteuid():  # root could take it over, and would change its mode
        raise RunDirectoryError(
            f"the run directory {root} belongs to {_user_name(owner)}", cure="name a new one; each run has its own"
        )
    if any(root.iterdir()):
        raise RunDirectoryError(f"the run directory {root} is not empty", cure="name a new one; each run has its own")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _cannot_write(path: Path, error: OSError) -> RunDirectoryError:
    in_the_way = isinstance(error, NotADirectoryError) and Path(error.filename or "") in (path, *path.parents)
    why = f"{error.filename} is not a folder" if in_the_way else error.strerror
    return RunDirectoryError(f"cannot write {path}: {why}", cure="name another place with --run-dir")
