"""How a run is named, and where its folder is by default."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError


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
            "there is no home directory for the files of runs", hint="set HOME, or name a place with --run-dir"
        ) from None
    return base / "distlaunch" / "runs"


def current_directory() -> Path:
    """The folder that we are in.

    Raises:
        UsageError: it is gone, or its name cannot be written into our files.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the current directory cannot be used: {error.strerror}", hint="change to a directory that exists"
        ) from None
    if not is_utf_8(here):
        raise UsageError(f"the current directory {os.fsencode(here)!r} is not UTF-8", hint="change to another one")
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
