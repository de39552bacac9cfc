"""A run's folder on disk: private to the user; files appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.errors import RunDirectoryError
from launcher.plan.paths import RunPaths
from launcher.run.controller import Controller, is_alive, parse_controller, this_process
from launcher.run.naming import absolute, is_utf_8
from worker_entry.protocol.file_names import make_private_directory


class RunDir(RunPaths):
    """One run's folder. Every method that writes raises RunDirectoryError when it cannot."""

    @classmethod
    def create(cls, root: Path) -> RunDir:
        """Makes the folder, which must not hold anything yet."""
        root = absolute(root)
        if not is_utf_8(root):
            raise RunDirectoryError(
                f"the run directory {os.fsencode(root)!r} is not UTF-8", hint="name another place with --run-dir"
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
        self.write_json(self.run, {"run_id": run_id, "controller": asdict(controller), "ended": ended})

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
            facts = json.loads(self.run.read_bytes())
            return str(facts["run_id"]), parse_controller(facts["controller"]), bool(facts["ended"])
        except (OSError, ValueError, KeyError, TypeError):
            raise RunDirectoryError(f"{self.root} is not the folder of a run") from None

    def write_stacks(self, text: str) -> str:
        """Returns why they cannot be written; empty if they are. A full disk, say, keeps nobody from training."""
        try:
            self.write_text(self.stacks, text)
        except RunDirectoryError as error:
            return error.message
        return ""

    def make_checkpoints(self) -> None:
        """Makes the folder for what programs save to go on from; the same for all attempts."""
        try:
            make_private_directory(str(self.checkpoints))
        except OSError as error:
            raise _cannot_write(self.checkpoints, error) from None

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
            f"the run directory {root} belongs to {_user_name(owner)}", hint="name a new one; each run has its own"
        )
    if any(root.iterdir()):
        raise RunDirectoryError(f"the run directory {root} is not empty", hint="name a new one; each run has its own")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _cannot_write(path: Path, error: OSError) -> RunDirectoryError:
    in_the_way = isinstance(error, NotADirectoryError) and Path(error.filename or "") in (path, *path.parents)
    why = f"{error.filename} is not a folder" if in_the_way else error.strerror
    return RunDirectoryError(f"cannot write {path}: {why}", hint="name another place with --run-dir")
