"""A run's folder on disk: private to the user; files are written atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RunDirectoryError, UsageError
from launcher.plan.paths import RunPaths
from launcher.printable import has_control
from launcher.rundir.names import absolute, is_utf_8, name_run
from launcher.rundir.owner import Controller, ElsewhereError, is_alive, this_process
from launcher.rundir.record import FORMAT, last_written, read_record
from launcher.tasks import TaskId
from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.frozen import asdict, dataclass, replace
from worker_entry.system import clock

if TYPE_CHECKING:
    from launcher.rundir.journal import Journal

PADDING = 4096
"""Bytes that the end of a run may add to run.json."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The facts that run.json has from the start of a run.

    `started`: Unix seconds. `generation`: the number of earlier controllers. `socket`: the path of the control socket.
    `cwd`: where the run was started. `checks`: whether its nodes are checked. `command`: the command line, without
    secrets. `job`: the Slurm job that the run belongs to, if any.
    """

    run_id: str
    name: str
    started: float
    cwd: str = ""
    command: str = ""
    checks: bool = False
    generation: int = 0
    socket: str = ""
    job: str = ""


class RunDir(RunPaths):
    """One run's folder. Methods that write raise RunDirectoryError on failure."""

    @classmethod
    def create(cls, root: Path) -> RunDir:
        """Makes the folder; an existing one must be empty."""
        root = absolute(root)
        if not is_utf_8(root):
            raise RunDirectoryError(
                f"the run directory {os.fsencode(root)!r} is not UTF-8", hint="choose another folder with --run-dir"
            )
        if has_control(str(root)):
            raise RunDirectoryError(
                f"the run directory {str(root)!r} has control characters", hint="choose another folder with --run-dir"
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

    def write_waiting(self, start: RunStart) -> None:
        """Writes run.json of a run that waits for its job; the job's own process becomes the controller later."""
        facts = {"format": FORMAT, **asdict(start), "directory": str(self.root), "controller": asdict(this_process())}
        self.write_text(self.run, f"{_render({**facts, 'ended': False, 'waits': True})}\n")

    def note_job(self, start: RunStart, job: str) -> None:
        """Adds the job to run.json, unless the run no longer waits."""
        with self._lock():
            if read_record(self).waits:
                self.write_waiting(replace(start, job=job))

    def note_cancelled(self, exit_status: int) -> None:
        """Marks a waiting run as ended because the user cancelled its job."""
        end = {"ended": True, "ended_at": clock.now(), "waits": False, "outcome": "interrupted"}
        with self._lock():
            facts = json.loads(self.run.read_bytes())
            end |= {"reference": "interrupted", "exit_status": exit_status}
            self.write_json(self.run, {**facts, **end})

    @contextlib.contextmanager
    def hold(self, start: RunStart, now: Callable[[], float] = clock.now) -> Iterator[Journal]:
        """Marks the run as running, and at the end as ended; yields its journal. `now`: Unix seconds.

        Raises:
            UsageError: another controller holds the run, or has held it since `start` was made.
        """
        facts = {"format": FORMAT, **asdict(start), "directory": str(self.root), "controller": asdict(this_process())}
        with self._lock():
            yield from self._hold(start, facts, now)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Holds a lock that ends with the process, so that a run never has two controllers."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(self.lock, error) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is resuming the run {self.root}") from None
            except OSError:  # a network disk without locks: only run.json protects the run
                pass
            yield
        finally:
            os.close(descriptor)

    def _hold(self, start: RunStart, facts: dict[str, Any], now: Callable[[], float]) -> Iterator[Journal]:
        # Imported here: commands that only read a run's folder need no models.
        from launcher.report.run_events import RunStarted
        from launcher.rundir.journal import Journal

        is_successor = start.generation > 0
        if (is_successor and self.find_generation() >= start.generation) or (not is_successor and self.events.exists()):
            raise UsageError(
                f"another process has just resumed the run {self.root}",
                hint=f"see `distlaunch status {name_run(self.root)}`",
            )
        written = last_written(self)
        # Padded, so that the end can be written even on a disk that is full by then.
        is_new = not self.run.exists()
        try:
            self.write_text(self.run, f"{_render({**facts, 'ended': False})}{' ' * PADDING}\n")
        except RunDirectoryError:
            if is_new:
                self.lock.unlink()
            raise
        try:
            journal = Journal(self.events, now)
        except OSError as error:
            raise _cannot_write(self.events, error) from None
        journal.write(RunStarted(start.run_id, start.name, str(self.root), start.generation, written))
        try:
            yield journal
        finally:
            journal.close()
            end = asdict(journal.ended) if journal.ended is not None else {}
            if self.find_generation() <= start.generation:  # otherwise another controller owns run.json
                end |= {"ended": True, "ended_at": now(), "waits": journal.waits}
                self._write_end(f"{_render({**facts, **end})}\n")

    def _write_end(self, text: str) -> None:
        try:
            self.write_text(self.run, text)
        except RunDirectoryError:
            with contextlib.suppress(OSError), self.run.open("r+b") as file:
                data = text.encode()
                file.write(data + b" " * (os.fstat(file.fileno()).st_size - len(data)))

    def read_run(self) -> tuple[str, Controller | None]:
        """Returns the run's ID and its controller; None if the controller has ended.

        Raises:
            RunDirectoryError: this is not a run's folder.
            UsageError: the controller cannot be seen from here.
        """
        record = read_record(self)
        try:
            return record.run_id, None if record.ended or not is_alive(record.controller) else record.controller
        except ElsewhereError as error:
            error.job = record.job
            raise

    def find_generation(self) -> int:
        """Returns the number of controllers before the latest one; 0 if run.json cannot be read."""
        try:
            return read_record(self).generation
        except RunDirectoryError:
            return 0

    def log_sizes(self, attempt: int, tasks: Iterable[TaskId]) -> dict[str, int]:
        """Returns the bytes of each task's log that are in the folder."""
        logs = {str(task): self.log(attempt, task) for task in tasks}
        return {task: log.stat().st_size for task, log in logs.items() if log.exists()}

    def write_stacks(self, text: str) -> str:
        """Writes the stacks; returns an error message or an empty string, since training continues on a full disk."""
        try:
            self.write_text(self.stacks, text)
        except RunDirectoryError as error:
            return error.message
        return ""

    def make_checkpoints(self) -> None:
        """Makes the checkpoint folder, which all attempts share."""
        try:
            make_private_directory(str(self.checkpoints))
        except OSError as error:
            raise _cannot_write(self.checkpoints, error) from None

    def write_json(self, path: Path, value: Any) -> None:
        self.write_text(path, f"{_render(value)}\n")

    def write_text(self, path: Path, text: str) -> None:
        try:
            replace_text(path, text)
        except OSError as error:
            raise _cannot_write(path, error) from None


def _render(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _check_unused(root: Path) -> None:
    """Checks an existing folder.

    Raises:
        RunDirectoryError: the folder belongs to another user, or is not empty.
        OSError: the folder cannot be read, or is not a folder.
    """
    if not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    owner = root.stat().st_uid
    if owner != os.geteuid():  # root could use it, but would change its mode
        raise RunDirectoryError(
            f"the run directory {root} belongs to {_user_name(owner)}",
            hint="choose a new folder; each run needs its own",
        )
    if any(root.iterdir()):
        raise RunDirectoryError(
            f"the run directory {root} is not empty", hint="choose a new folder; each run needs its own"
        )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _cannot_write(path: Path, error: OSError) -> RunDirectoryError:
    in_the_way = isinstance(error, NotADirectoryError) and Path(error.filename or "") in (path, *path.parents)
    why = f"{error.filename} is not a folder" if in_the_way else error.strerror
    return RunDirectoryError(f"cannot write {path}: {why}", hint="choose another folder with --run-dir")


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes the file; replaces an existing file once the new content is on the disk.

    Args:
        path: the file.
        text: its content.
        mode: its permissions, restricted by the user's umask.

    Raises:
        OSError: the file cannot be written; an existing file stays unchanged.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    # Exclusive: in a folder that others can write to, the name could be a link to a file of this user.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
