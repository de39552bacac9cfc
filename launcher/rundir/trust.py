"""Whose runs a command may act on: a run's folder says what is executed, which sockets are called, which jobs end."""

from __future__ import annotations

from launcher.errors import UsageError
from launcher.rundir.directory import RunDir
from worker_entry.system.ownership import TRUST, find_writer, is_trusted


def verify_own(files: RunDir) -> RunDir:
    """Returns the run.

    Raises:
        UsageError: another user can write to its folder, and the user has not said that the folder is trusted.
    """
    folder = files.root.resolve()
    try:
        reason = "" if is_trusted(str(folder)) else find_writer(str(folder))
    except OSError:  # a run that is gone: the caller notices
        reason = ""
    if reason:
        raise UsageError(
            f"{reason}, so it may say what that user wants",
            hint=f"if you trust whoever writes there, set {TRUST}={folder}; "
            "`distlaunch logs` and `status` show the run as it is",
        )
    return files
