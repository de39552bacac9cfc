"""The files of a run, all named here. The folder is private to the user; files appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Where runs go that are told no place: `runs` in distlaunch's part of the user's state directory."""
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
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
        self._run = root / "run.json"
        self._lock: int | None = None

    @classmethod
    def create(cls, root: Path) -> RunDir:
        """Makes the folder, which must not hold anything yet."""
        root = root.absolute()
        try:
            if root.exists() and any(root.iterdir()):
                raise RunDirectoryError(
                    f"the run directory {root} is not empty", cure="name a new one; each run has its own"
                )
            make_private_directory(str(root))
            root.chmod(0o700)
        except OSError as error:
            raise _cannot_write(root, error) from None
        return cls(root)

    def hold(self, run_id: str) -> None:
        """Says that the run is under way, for as long as this process lives."""
        self.write_json(self._run, {"run_id": run_id, "pid": os.getpid()})
        self._lock = os.open(self._run, os.O_RDWR)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read_run(self) -> tuple[str, int | None]:
        """The run's name, and the process that is at work on it, if one is.

        Raises:
            RunDirectoryError: this is no run's folder.
        """
        try:
            with self._run.open("rb") as file:
                facts = json.load(file)
                run_id, pid = str(facts["run_id"]), int(facts["pid"])
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    return run_id, pid
        except (OSError, ValueError, KeyError, TypeError):
            raise RunDirectoryError(f"{self.root} is not the folder of a run") from None
        return run_id, None

    def ask_stacks(self, within_s: float = 15.0) -> str:
        """What all tasks of the run are doing, by its distlaunch.

        Raises:
            UsageError: the run is over, or does not answer.
        """
        run_id, pid = self.read_run()
        if pid is None:
            raise UsageError(f"run {run_id} is over")
        before = self._stacks_written()
        os.kill(pid, STACKS_SIGNAL)
        deadline = time.monotonic() + within_s
        while self._stacks_written() == before:
            if time.monotonic() > deadline:
                raise UsageError(f"run {run_id} does not say within {within_s:g} s what its tasks are doing")
            time.sleep(0.05)
        return self.stacks.read_text(encoding="utf-8")

    def ask_to_end(self, within_s: float = 120.0) -> bool:
        """Has the run's distlaunch end it, and waits for that. Returns whether it was under way at all.

        Raises:
            RunDirectoryError: it has not ended within this time.
        """
        run_id, pid = self.read_run()
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + within_s
        while self.read_run()[1] is not None:
            if time.monotonic() > deadline:
                raise RunDirectoryError(
                    f"run {run_id} has not ended within {within_s:g} s", cure=f"look at its terminal, or at {self.root}"
                )
            time.sleep(0.05)
        return True

    def _stacks_written(self) -> int:
        return self.stacks.stat().st_mtime_ns if self.stacks.exists() else 0

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

    def make_checkpoints(self) -> Path:
        """The folder for what programs save to go on from; the same for all attempts."""
        folder = self.root / "checkpoints"
        try:
            make_private_directory(str(folder))
        except OSError as error:
            raise _cannot_write(folder, error) from None
        return folder

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
    folder = next((path for path in (Path(what), runs_directory(os.environ) / what) if path.is_dir()), None)
    if folder is None:
        raise UsageError(f"there is no run {what}", cure="name a run's folder, as its first line tells it")
    return RunDir(folder.absolute())


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file that say something; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            begin, end = last_data(file.fileno())
            file.seek(max(begin, end - TAIL_BYTES))
            data = file.read(min(end - begin, TAIL_BYTES))
    except OSError:
        return []
    log = LogLines()
    lines = [*log.feed(_ZEROS.sub(b"", data.strip(b"\0"))), *log.close()]
    return [line.decode("utf-8", "replace")[:400] for line in lines if line.strip()][-count:]


def _cannot_write(path: Path, error: OSError) -> RunDirectoryError:
    in_the_way = isinstance(error, NotADirectoryError) and Path(error.filename or "") in (path, *path.parents)
    why = f"{error.filename} is not a folder" if in_the_way else error.strerror
    return RunDirectoryError(f"cannot write {path}: {why}", cure="name another place with --run-dir")
