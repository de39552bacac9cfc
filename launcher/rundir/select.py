"""Finds the run that a command's argument RUN names, and all runs of this user.

RUN is the name of a run's folder in the runs directory, a unique part of such a name, or the path of a folder. A path
has a slash: nothing in the current folder, which may be another user's, is taken for a run by its name alone. Without
RUN, a command takes the only running run, or the latest run if none is running.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.names import absolute, runs_directory
from launcher.rundir.record import RunRecord, read_record
from launcher.rundir.summary import RunSummary, summarize
from launcher.wording import render_age
from worker_entry.system.ownership import TRUST, find_writer, is_trusted

SHOWN = 10
"""Candidates that an error lists."""


def select_run(text: str | None, *, running: bool = False, reads: bool = False) -> RunDir:
    """Returns the run that RUN names.

    Args:
        text: RUN as typed; None if it was left out.
        running: the command is for running runs: prefer them, and do not fall back to the latest ended run.
        reads: the command only shows what the run's files say, and so may be about another user's run.

    Raises:
        UsageError: no run, or more than one, is meant; or another user can write to its folder.
    """
    found = _select_without_name(running=running) if text is None else _select(text, running=running)
    return found if reads else verify_own(found)


def _select(text: str, *, running: bool) -> RunDir:
    if "/" in text or text in (".", ".."):
        if not _is_folder(Path(text)):
            raise _no_such_run(text)
        path = absolute(Path(text))
        return RunDir(path.resolve() if ".." in path.parts else path)
    # An empty text comes from an unset shell variable; it must not match every run.
    exact = runs_directory(os.environ) / text
    if text and _is_folder(exact):
        return RunDir(exact)
    found = [files for files, _ in find_runs() if text in files.root.name] if text else []
    if len(found) > 1 and running:
        found = [files for files in found if is_running(files)] or found
    if len(found) > 1:
        raise _ambiguous(f"{len(found)} runs have {text!r} in their names", found)
    if found:
        return found[0]
    raise _no_such_run(text)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:  # missing, not permitted, or a name that is too long
        return False


def find_runs() -> Iterator[tuple[RunDir, RunRecord]]:
    """The runs in the runs directory, the latest first. Other and unreadable folders are skipped."""
    runs = []
    for files in run_folders():
        try:
            runs.append((files, read_record(files)))
        except RunDirectoryError:
            continue
    yield from sorted(runs, key=lambda run: (run[1].started, run[0].root.name), reverse=True)


def run_folders() -> Iterator[RunDir]:
    """The folders in the runs directory; some may not belong to runs."""
    directory = runs_directory(os.environ)
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # there has been no run yet
        return
    yield from (RunDir(directory / name) for name in names)


def list_runs() -> list[RunSummary]:
    """All runs, the latest first."""
    return [found for files, _ in find_runs() if (found := summarize_if_there(files)) is not None]


def list_unended() -> list[RunSummary]:
    """The runs that are running, queued or lost, the latest first; faster than `list_runs`."""
    unended = (files for files, record in find_runs() if not record.ended or record.waits)
    summaries = [found for files in unended if (found := summarize_if_there(files)) is not None]
    return [found for found in summaries if found.running or found.state == "lost"]


def list_running() -> list[RunSummary]:
    """The runs that are running or queued, the latest first."""
    return [found for found in list_unended() if found.running]


def is_running(files: RunDir) -> bool:
    found = summarize_if_there(files)
    return found is not None and found.running


def summarize_if_there(files: RunDir) -> RunSummary | None:
    """The run's summary; None if the run has been removed in the meantime."""
    try:
        return summarize(files)
    except RunDirectoryError:
        return None


def _select_without_name(*, running: bool) -> RunDir:
    found = list_running()
    if len(found) == 1:
        return RunDir(Path(found[0].directory))
    if found:
        raise _ambiguous(f"{len(found)} runs are running", [RunDir(Path(each.directory)) for each in found])
    latest = next((files for files, _ in find_runs()), None)
    if running or latest is None:
        raise UsageError(
            "no run is running" if running else f"there is no run in {runs_directory(os.environ)}",
            hint="`distlaunch ls -a` lists ended runs; give the folder of a run that is elsewhere",
        )
    return latest


def _ambiguous(message: str, candidates: Sequence[RunDir]) -> UsageError:
    summaries = [found for files in candidates[:SHOWN] if (found := summarize_if_there(files)) is not None]
    now = time.time()
    evidence = [f"{each.name}  {each.shown_state}, {render_age(now - each.started)}" for each in summaries]
    more = len(candidates) - SHOWN
    return UsageError(
        message, evidence=[*evidence, *([f"and {more} more"] if more > 0 else [])], hint="name one of them"
    )


def _no_such_run(text: str) -> UsageError:
    is_folder = text and "/" not in text and _is_folder(Path(text))
    return UsageError(
        f"there is no run {text or repr(text)}",
        hint=f"for the folder, write ./{text}"
        if is_folder
        else "`distlaunch ls -a` lists all runs; or give the run's folder",
    )


def verify_own(files: RunDir) -> RunDir:
    """Returns the run if its folder can be trusted; the folder names programs to execute, sockets, and jobs to cancel.

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
