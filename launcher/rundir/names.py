"""The name of a run, and its default folder."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.printable import has_control, printable
from launcher.spec.redaction import hide_command


def make_run_id(name: str) -> str:
    """`20261121-143005-two-nodes-3f9a`: sorts by time; unique among runs of the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.urandom(2).hex()}"


def name_job(job: str) -> str:
    """The folder name of a job's run; a requeued job finds its run by this name."""
    return f"slurm-{job}"


def make_job_folder(job: str) -> str:
    """An unused folder name: `slurm-12`, or `slurm-12-2` for a second run in the same job."""
    taken = {folder.name for folder in runs_directory(os.environ).glob(f"{name_job(job)}*")}
    names = itertools.chain([name_job(job)], (f"{name_job(job)}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def runs_directory(environ: Mapping[str, str]) -> Path:
    """The default folder of runs, in the user's state directory.

    Raises:
        RunDirectoryError: the user has neither a state directory nor a home directory.
    """
    state = environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError:  # a user ID without an account, as in some containers
        raise RunDirectoryError(
            "there is no home directory for the files of runs", hint="set HOME, or choose a folder with --run-dir"
        ) from None
    return base / "distlaunch" / "runs"


def choose_folder(run_dir: Path | None, run_id: str) -> Path:
    """The folder that the user has chosen for a run; otherwise, `run_id` in the default folder of runs."""
    return run_dir if run_dir is not None else runs_directory(os.environ) / run_id


def name_run(directory: Path) -> str:
    """The argument by which commands find the run: a name in the default folder of runs, otherwise a path."""
    return directory.name if directory.parent == runs_directory(os.environ) else str(directory)


def current_directory() -> Path:
    """The current folder.

    Raises:
        UsageError: the folder is gone, or its name is not UTF-8 or has control characters.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current directory cannot be used: {error.strerror}", hint="change to a directory that exists"
        ) from None
    if not is_utf_8(here):
        raise UsageError(
            f"the current directory {os.fsencode(here)!r} is not UTF-8", hint="change to another directory"
        )
    if has_control(str(here)):
        raise UsageError(
            f"the current directory {str(here)!r} has control characters", hint="change to another directory"
        )
    return here


def current_command() -> str:
    """The command line of this process as typed in a shell, without secrets."""
    return printable(shlex.join(["distlaunch", *hide_command(sys.argv[1:])]))


def absolute(path: Path) -> Path:
    """The path made absolute.

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
